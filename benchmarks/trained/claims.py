"""What the papers say of trained models, and what the result files say to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.trained.paired import Difference, difference_text, paired
from benchmarks.trained.records import ResultFile

Results = Mapping[str, ResultFile]


@dataclass(frozen=True)
class Comparison:
    """That a figure of ``method`` is below (``sign`` -1), above (1) or at (0) that of ``base``.

    ``base`` is another method of the suite, or a number.
    """

    suite: str
    figure: str
    method: str
    base: str | float
    sign: int


@dataclass(frozen=True)
class Claim:
    """A statement with the comparisons that would show it; without any, ``why`` it has none."""

    source: str
    says: str
    comparisons: Sequence[Comparison] = ()
    why: str = ""


def values_of(held: ResultFile, method: str, figure: str) -> dict[int, float]:
    """The figure of a method by seed, where it has one; ``end_`` is that of the last batches."""
    runs = {run["seed"]: run for run in held.runs if run["method"] == method}
    if not figure.startswith("end_"):
        figures = {seed: run["figures"] for seed, run in runs.items()}
        return {seed: found[figure] for seed, found in figures.items() if figure in found}
    curve, name = {s: r["curves"] for s, r in runs.items()}, figure.removeprefix("end_")
    return {s: sum(points[-1][name]) / len(points[-1][name]) for s, points in curve.items()}


def difference(held: ResultFile, figure: str, method: str, base: str | float) -> Difference:
    """Of a method to its base, over the seeds that both have."""
    ours = values_of(held, method, figure)
    if not isinstance(base, str):
        return paired(list(ours.values()), [base] * len(ours))
    theirs = values_of(held, base, figure)
    seeds = sorted(set(ours) & set(theirs))
    return paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def verdict(found: Difference, sign: int) -> str:
    """Whether the difference is seen, with the sign of the claim or the other, and what it is."""
    if not found.pairs:
        return "has not run"
    said = difference_text(found, 3)
    if not sign:
        return f"a difference is {'seen: ' if found.is_seen else ''}{said}"
    if not found.is_seen:
        return said
    return f"{'seen' if found.mean * sign > 0 else 'the opposite is seen'}: {said}"


CLAIMS = (
    Claim(
        "S0 7.2, Table 1",
        "smoothing lowers the loss of top-k",
        [
            Comparison("quick", "bits", "smooth", "top-k", -1),
            Comparison("quick", "bits", "smooth-detached", "top-k", -1),
            Comparison("quick", "bits", "smooth-exact", "top-k", -1),
            Comparison("quick", "bits", "smooth-unclipped", "top-k-unclipped", -1),
            Comparison("published", "bits", "smooth-near-0", "top-k", -1),
            Comparison("published", "bits", "smooth-near-0-detached", "top-k", -1),
        ],
    ),
    Claim(
        "S0 7.2, Table 1",
        "and that on attacked text",
        [
            Comparison("quick", "bits_attacked", "smooth", "top-k", -1),
            Comparison("quick", "bits_attacked", "smooth-detached", "top-k", -1),
        ],
    ),
    Claim(
        "S0 7.2, Table 1",
        "ReMoE is slightly better than top-k",
        [Comparison("quick", "bits", "relu", "top-k", -1)],
    ),
    Claim(
        "S0 7.2, Table 1",
        "and worse than smoothing",
        [Comparison("quick", "bits", "relu", "smooth", 1)],
    ),
    Claim(
        "S0 B.5, Table 5",
        "annealed to hard top-k, smoothing keeps a part of its gain",
        [
            Comparison("quick", "bits", "smooth-annealed", "top-k", -1),
            Comparison("quick", "bits", "smooth-annealed", "smooth", 1),
        ],
    ),
    Claim(
        "S0 B.5",
        "trained with smoothing and cut off at inference, a model does not fit",
        [Comparison("quick", "bits", "smooth-hard", "smooth", 1)],
    ),
    Claim(
        "S0 6, B.4",
        "the boundary loss brings the experts per token to the budget of k + 1/2",
        [
            Comparison("quick", "experts_per_token", "smooth", 2.5, 0),
            Comparison("quick", "experts_per_token", "smooth-detached", 2.5, 0),
        ],
    ),
    Claim(
        "S0 B.5",
        "a budget that is annealed to k takes the additional experts away by the end of training",
        [Comparison("quick", "end_experts_per_token", "smooth-annealed", 2.0, 0)],
    ),
    Claim(
        "S0 7.3, Table 3",
        "smoothing raises the accuracy in a domain that was left out",
        [Comparison("digits", "accuracy", "smooth", "top-k", 1)],
    ),
    Claim(
        "arXiv 2206.04046",
        "a cosine router raises it",
        [Comparison("digits", "accuracy", "cosine", "top-k", 1)],
    ),
    Claim(
        "S1 Remark 5.10",
        "centring evens the loads that the mean input makes uneven",
        [
            Comparison("quick", "input_pull", "centred", "top-k", -1),
            Comparison("quick", "max_vio", "centred", "top-k", -1),
        ],
    ),
    Claim(
        "S3 F.3",
        "OSR reaches a lower loss than top-k",
        [
            Comparison("quick", "bits", "osr", "top-k", -1),
            Comparison("quick", "bits", "osr-causal", "top-k", -1),
        ],
    ),
    Claim(
        "S3 F.4",
        "OSR is more even than top-k",
        [
            Comparison("quick", "max_vio", "osr", "top-k", -1),
            Comparison("quick", "max_vio", "osr-causal", "top-k", -1),
        ],
    ),
    Claim(
        "S3 F.5",
        "the experts of OSR are nearer to orthogonal than those of top-k",
        [Comparison("quick", "gram_z", "osr", "top-k", 1)],
    ),
    Claim(
        "S3 E.1",
        "one shared expert is better than none",
        [Comparison("study-shared", "bits", "0", "1", 1)],
    ),
    Claim(
        "S3 E.1",
        "and more are no better than one",
        [Comparison("study-shared", "bits", "2", "1", 0)],
    ),
    Claim(
        "S3 E.2",
        "dense first layers are worse",
        [
            Comparison("study-first-dense", "bits", "1", "0", 1),
            Comparison("study-first-dense", "bits", "2", "0", 1),
        ],
    ),
    Claim(
        "S3 E.3",
        "a temperature of 1 is best",
        [Comparison("study-temperature", "bits", value, "1", 1) for value in ("0.1", "0.5", "2")],
    ),
    Claim(
        "S0 7.4, Table 2",
        "smoothing helps on GLUE",
        why="needs a pretrained BERT and the five tasks",
    ),
    Claim(
        "S0 7.3",
        "the gain grows with the size of the data",
        why="needs data of several sizes beyond these two cores",
    ),
    Claim(
        "S3 C",
        "OSR is ahead on MMLU, GSM8K, HumanEval and the other benchmarks of models of 7 billion "
        "weights",
        why="needs such a model; the paper itself has placeholders for numbers",
    ),
)
