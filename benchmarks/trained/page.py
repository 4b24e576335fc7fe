"""docs/comparison.md, of the result files alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.trained import digits
from benchmarks.trained.claims import (
    CLAIMS,
    Claim,
    Comparison,
    Results,
    difference,
    values_of,
    verdict,
)
from benchmarks.trained.methods import BASE, METHODS, Method
from benchmarks.trained.paired import NOT_SEEN, difference_text, spread_text
from benchmarks.trained.records import FOLDER, ResultFile, read
from benchmarks.trained.settings import SIZES
from benchmarks.trained.studies import STUDIES, Study
from moegeom.core.text import number_of

#: Router figures of the second table: heading and digits. Flips are in percent.
ROUTER_FIGURES = {
    "experts_per_token": ("experts per token", 2),
    "max_vio": ("MaxVio", 2),
    "gram_z": ("Gram z", 1),
    "effective_sets": ("expert sets in use", 1),
    "input_pull": ("input pull", 2),
    "flipped_share": ("flipped, %", 2),
    "jump_over_output": ("jump", 2),
}

#: What a claim calls a figure, where it is not as the tables say.
FIGURE_NAMES = {
    "bits": "bits per byte",
    "bits_attacked": "bits per byte, attacked",
    "end_experts_per_token": "experts per token at the end",
    "accuracy": "accuracy, %",
    **{figure: head for figure, (head, _) in ROUTER_FIGURES.items()},
}

#: Pictures that are drawn beside the page, with what they show.
PICTURES = {
    "trained-eps": "Width of smoothing and experts per token over the training steps",
    "trained-loss": "Loss over the training steps",
    "trained-usage": "Share of the slots of each expert over the training steps",
}

HEAD = """# Routers compared by training

Written by `docs/refresh_comparison.py` from the files in `benchmarks/results/trained`. Small
models, trained beside each other on two cores: they show what such a training can see of what the
papers claim, not what large models do. Routers are those of [trainable.md](trainable.md). Methods
share seeds, batches and every initial weight that they have in common, so that differences are
paired: the mean over seeds with its 95 % interval (Student's t). Where the interval holds 0 the
table says *not seen at this size* with what was measured. Many differences are looked at, each at
95 %: about one in twenty of them would be seen by chance.
"""

HOW = """The text is that of the sample checkpoints, read from the Python installation, in four
domains. *Attacked* is the held-out text with words replaced by "AAA", each with probability 0.025
(S0 C.1.1). *Width per token* is the number of hidden units of feed-forward blocks that a token goes
through, the mean over layers. *Cost* are the multiply-adds of a block for a token, those of the
router with them, over top-k's. *ms per step* is processor time of one thread, the median over
steps, in a program that was not made for speed.
"""

ROUTERS = """Means over layers, on held-out text. *MaxVio*: the largest load over the fair one, less
1. *Gram z*: how much less the rows of the router share directions than random ones, in standard
deviations; for the cosine router in its own space. *Expert sets in use*: exp of the entropy of the
chosen sets. *Input pull*: how much of the choice the mean input makes
(`moegeom list metrics input_pull`). *Flipped*: tokens that choose another set with inputs, rows
and logits in bfloat16. *Jump*: the median over tokens of how far the routed output jumps at the
nearest boundary, over its length. A figure that a method does not have is left out.
"""


def load_results() -> Results:
    """The committed result files by suite."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}


def page(results: Results) -> str:
    """The whole page."""
    parts = [HEAD]
    for size in SIZES:
        parts += language(size, results.get(size))
    parts += ["## Claims of the papers\n", claims(results)]
    parts += turned_digits(results.get("digits"))
    parts += ["## One thing at a time\n", *studies(results)]
    parts += ["## To repeat it\n", repeat()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(held: ResultFile) -> str:
    """Where and with what the runs were made."""
    commits = ", ".join(sorted({run["commit"] for run in held.runs}))
    versions = ", ".join(f"{name} {version}" for name, version in held.facts["versions"].items())
    minutes = round(sum(run.get("seconds", 0.0) for run in held.runs) / 60.0)
    settings = held.facts["settings"]
    seeds = number_of(len({run["seed"] for run in held.runs}), "seed")
    return (
        f"{settings['steps']} steps, {seeds}, {number_of(minutes, 'minute')} by the clock. "
        f"{held.facts['core']}; {versions}; commit {commits}."
    )


# --------------------------------------------------------------------------------- language models
def language(size: str, held: ResultFile | None) -> Iterator[str]:
    """Both tables of one size of language model."""
    yield f"## Language models, `--{size}`\n"
    s = SIZES[size]
    yield (
        f"D = {s.hidden}, {s.layers} layers, E = {s.experts}, k = {s.top_k}, experts of width "
        f"{s.width}; {4 * s.sequences_per_domain} sequences of {s.length} bytes a step; routing "
        f"weights {'' if s.renormalise else 'not '}divided by their sum; rate {s.learning_rate:g}, "
        f"decay {s.weight_decay:g}.\n"
    )
    if held is None:
        yield "This size has not run: no result file of it is committed.\n"
        return
    yield provenance(held) + "\n"
    yield HOW
    known = [method for method in _methods() if values_of(held, method.name, "bits")]
    yield table(
        (
            "method",
            "bits per byte",
            "minus top-k",
            "attacked",
            "minus top-k",
            "width per token",
            "cost",
            "parameters",
            "ms per step",
        ),
        [_loss_row(held, method) for method in known],
    )
    yield _summary(held, known)
    yield ROUTERS
    routed = [method for method in known if values_of(held, method.name, "experts_per_token")]
    yield table(
        ("method", *(head for head, _ in ROUTER_FIGURES.values())),
        [_router_row(held, method) for method in routed],
    )
    missing = [f"`{method.name}`" for method in _methods() if method not in known]
    if missing:
        yield f"Not run: {', '.join(missing)}.\n"
    if size == "published":
        yield from mechanism(held)
    if size == "quick":
        yield from (f"![{text}](pictures/{name}.svg)\n" for name, text in PICTURES.items())


def mechanism(held: ResultFile) -> Iterator[str]:
    """Why a smoothed gate that begins near 0 is worse, and when it is not."""

    def end(name: str, figure: str, places: int) -> str:
        return spread_text(list(values_of(held, name, f"end_{figure}").values()), places)

    def apart(side: str) -> str:
        return difference_text(difference(held, "bits", f"smooth-near-0-{side}", BASE), 3)

    attached, detached = (
        f"eps is {end(name, 'eps', 3)} and a token has {end(name, 'experts_per_token', 2)} experts"
        for name in ("smooth-near-0", "smooth-near-0-detached")
    )
    yield (
        "**Where the difference comes from.** Slopes of the factor reach 17.8 / eps. After 60 "
        "steps of top-k the gradient of a router is 44, 24, 2.0 and 1.0 times as long with the "
        "gradient through the factor as without it, at eps = 0.001, 0.01, 0.1 and 0.5, that of all "
        "other weights 2.6, 2.4, 1.0 and 1.0 times "
        "(`python -m benchmarks.gates_near_zero_drown_the_gradient`). So a width that begins near "
        f"0 trains on noise, and the task keeps it there: at the end {attached}, of a budget of "
        f"2.5. Without that gradient {detached}, and smoothing is worth no more than the table "
        "says. Most of the harm goes through what the router reads: against top-k bits per byte "
        f"change by {apart('inputs')} with that gradient to the inputs alone, {apart('rows')} with "
        "it to the rows alone.\n"
    )


def _methods() -> list[Method]:
    """Methods, each followed by its other ways to be evaluated."""
    return [one for method in METHODS.values() for one in (method, *method.also)]


def _loss_row(held: ResultFile, method: Method) -> list[str]:
    row = [method.text]
    for figure in ("bits", "bits_attacked"):
        row.append(spread_text(list(values_of(held, method.name, figure).values()), 3))
        is_base = method.name == BASE
        row.append(
            "" if is_base else difference_text(difference(held, figure, method.name, BASE), 3)
        )
    runs = [run for run in held.runs if run["method"] == method.name]
    row.append(f"{np.mean(list(values_of(held, method.name, 'active_width').values())):.0f}")
    row.append(f"{_cost(held, method) / _cost(held, METHODS[BASE]):.2f}")
    row.append(f"{runs[0]['parameters']:,}")
    times = values_of(held, method.name, "ms_per_step")
    row.append(f"{np.median(list(times.values())):.0f}" if times else "")
    return row


def _cost(held: ResultFile, method: Method) -> float:
    """Multiply-adds of a block for a token: of what it goes through, and of the router."""
    settings = SIZES[held.facts["settings"]["name"]]
    widths = list(values_of(held, method.name, "active_width").values())
    of_router = method.block(settings).router_macs(settings.length)
    return 3.0 * settings.hidden * float(np.mean(widths)) + of_router


def _summary(held: ResultFile, known: Sequence[Method]) -> str:
    """Which methods are better and worse than top-k, and of which nothing is seen by pairs."""
    sorted_out: dict[str, list[str]] = {"lower": [], "higher": [], NOT_SEEN: []}
    for method in known:
        if method.name == BASE:
            continue
        found = difference(held, "bits", method.name, BASE)
        if found.pairs < 2:
            continue
        kind = ("lower" if found.mean < 0 else "higher") if found.is_seen else NOT_SEEN
        sorted_out[kind].append(f"`{method.name}`")
    named = {kind: ", ".join(names) or "none" for kind, names in sorted_out.items()}
    return (
        f"Held-out bits per byte against top-k: lower of {named['lower']}; higher of "
        f"{named['higher']}; {NOT_SEEN}: {named[NOT_SEEN]}.\n"
    )


def _router_row(held: ResultFile, method: Method) -> list[str]:
    row = [method.text]
    for figure, (_, places) in ROUTER_FIGURES.items():
        values = list(values_of(held, method.name, figure).values())
        scale = 100.0 if figure == "flipped_share" else 1.0
        row.append(spread_text([scale * value for value in values], places) if values else "")
    return row


# ------------------------------------------------------------------------------------------- claims
def claims(results: Results) -> str:
    """Every claim with what was seen of it."""
    rows = [[claim.source, claim.says, _answer(claim, results)] for claim in CLAIMS]
    return table(("source", "claim", "here"), rows)


def _answer(claim: Claim, results: Results) -> str:
    if not claim.comparisons:
        return f"cannot be tested here: {claim.why}"
    return "; ".join(_compared(each, results) for each in claim.comparisons)


def _compared(asked: Comparison, results: Results) -> str:
    base = asked.base if isinstance(asked.base, str) else f"{asked.base:g}"
    figure = FIGURE_NAMES.get(asked.figure, asked.figure.replace("_", " "))
    name = f"{figure}, `{asked.method}` minus `{base}`"
    held = results.get(asked.suite)
    if held is None:
        return f"{name}: has not run"
    found = difference(held, asked.figure, asked.method, asked.base)
    size = held.facts["settings"]
    scale = f"{found.pairs} seeds, width {size['hidden']}, rate {size['learning_rate']:g}"
    return (
        f"{name}: {verdict(found, asked.sign)} ({scale})" if found.pairs else f"{name}: has not run"
    )


# ------------------------------------------------------------------------------------------- digits
def turned_digits(held: ResultFile | None) -> Iterator[str]:
    """Accuracy at each angle that was left out."""
    yield "## Digits at an angle that was left out\n"
    if held is None:
        yield "Has not run.\n"
        return
    yield (
        "The images of `sklearn.datasets.load_digits`, turned by 0, 15, 30 and 45 degrees; a model "
        "of two routed blocks is trained at three angles and tested at the fourth, on images that "
        "it has seen at none. Accuracy in percent; a stand-in for the domains of DomainBed, which "
        "need pretrained vision models.\n"
    )
    yield provenance(held) + "\n"
    heads = ["method", *(f"{angle} left out" for angle in digits.ANGLES), "mean", "minus top-k"]
    rows = []
    for name in digits.METHODS:
        if not values_of(held, name, "accuracy"):
            continue
        figures = [*(f"accuracy_{angle}" for angle in digits.ANGLES), "accuracy"]
        row = [spread_text(list(values_of(held, name, f).values()), 1) for f in figures]
        less = "" if name == BASE else difference_text(difference(held, "accuracy", name, BASE), 2)
        rows.append([METHODS[name].text, *row, less])
    yield table([*heads], rows)


# ------------------------------------------------------------------------------------------ studies
def studies(results: Results) -> Iterator[str]:
    """Tables of the studies that ran, and the names of those that did not."""
    yield (
        "The quick setting with one thing changed, two seeds unless it says otherwise: intervals "
        "of two pairs are wide (Student's quantile is 12.7). Differences are to the "
        "value in bold.\n"
    )
    for name, study in STUDIES.items():
        held = results.get(f"study-{name}")
        if held is not None:
            yield f"### `--study {name}`: {study.text}\n"
            yield provenance(held) + "\n"
            yield _study(study, held)
            yield _finding(study, held)
    missing = [name for name in STUDIES if f"study-{name}" not in results]
    if missing:
        yield f"Not run: {', '.join(f'`--study {name}`' for name in missing)}.\n"


def _known(study: Study, held: ResultFile) -> list[str]:
    return [value for value in study.values if values_of(held, value, "bits")]


def _study(study: Study, held: ResultFile) -> str:
    rows = []
    for value in _known(study, held):
        is_base = value == study.base
        row = [f"**{value}**" if is_base else value]
        for figure in ("bits", "bits_attacked"):
            row.append(spread_text(list(values_of(held, value, figure).values()), 3))
            row.append(
                "" if is_base else difference_text(difference(held, figure, value, study.base), 3)
            )
        for figure, places in (("max_vio", 2), ("active_width", 0)):
            values = list(values_of(held, value, figure).values())
            row.append(f"{np.mean(values):.{places}f}" if values else "")
        rows.append(row)
    heads = ("value", "bits per byte", "minus base", "attacked", "minus base", "MaxVio", "width")
    return table(heads, rows)


def _finding(study: Study, held: ResultFile) -> str:
    """A sentence, only where an interval leaves 0 out."""
    found = []
    for value in _known(study, held):
        gap = difference(held, "bits", value, study.base)
        if value != study.base and gap.is_seen:
            found.append(f"{value} is {'worse' if gap.mean > 0 else 'better'} than {study.base}")
    return f"Finding: {'; '.join(found)}.\n" if found else f"Finding: none, {NOT_SEEN}.\n"


def repeat() -> str:
    """The commands."""
    lines = [
        "Each adds its runs to a file as they come, and leaves those alone that are there:",
        "",
        "```",
        *(f"python -m benchmarks.trained.compare --{size}" for size in SIZES),
        "python -m benchmarks.trained.compare --digits",
        *(f"python -m benchmarks.trained.compare --study {name}" for name in STUDIES),
        "python docs/refresh_comparison.py",
        "```",
    ]
    return "\n".join(lines)
