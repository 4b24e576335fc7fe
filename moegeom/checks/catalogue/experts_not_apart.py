"""MGG208: experts that were copied from one block differ by more than the noise they began with.

Looked for: with --experts, 64 kB of each expert, half of it rows of the first matrix and half of
the last. Experts with a common start have entries that correlate; what lies between them is then
tested for being independent normal numbers of one variance: kurtosis, energies of rows, columns and
experts, the largest singular value beside that of noise, and the part along what they share. The
rounding of the format in which they are stored is allowed for. Experts that were drawn apart do not
correlate, and pass.

A finding means: the experts of this router are copies of one block plus noise, in both matrices, or
copies up to the last digits of their storage: whatever training added to them is common to all, or
small beside the noise. They compute nearly the same, and whom the router chooses hardly matters.
Of 700 sets of untrained copies all were found, of 200 healthy ones none. Growth passes that has the
size of a fifth (rank 1), a half (sums of gradients) or all of the noise (signs of them); smaller
growth may be taken for noise, and growth without any pattern always is. Missed is noise in
proportion to each weight, and a share of neurons drawn anew, as in drop-upcycling.

What to do: where this is a model before its training, nothing. Else train on, with a higher rate or
more noise at the start, and look whether gradients reach the experts; docs/upcycling.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moegeom.checks.check import Check, Limit, Limits, Unknown, same_sentence
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of

#: With fewer numbers of each expert its kurtosis tells nothing.
_LEAST = 512


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    facts = measured.run["expert_spread"]
    if not (facts["left_out"] or facts["matrices"]):
        yield Unknown("checkpoint", "it has no router whose experts could be read")
    for router, reason in {one["router"]: one["reason"] for one in facts["left_out"]}.items():
        yield Unknown(router, reason)
    by_router: dict[str, list[Mapping[str, Any]]] = {}
    for matrix in facts["matrices"]:
        by_router.setdefault(matrix["router"], []).append(matrix)
    for router, matrices in by_router.items():
        few = min(matrix["num_values"] for matrix in matrices)
        if few < _LEAST:
            yield Unknown(router, f"a sample of {few} numbers of each expert tells too little")
        elif unknown := next(filter(None, map(_uncomputed, matrices)), ""):
            yield Unknown(router, unknown)
        elif all(_is_noise(matrix, router, limits) for matrix in matrices):
            yield CHECK.finding(router, _title(matrices), " ".join(map(_told, matrices)))


def _uncomputed(matrix: Mapping[str, Any]) -> str:
    """Why a figure of a matrix is missing; empty where none is."""
    if matrix["correlation"] is None:
        return f"an expert is all 0 in the sample of its {matrix['matrix']} matrix"
    is_open = matrix["is_resolved"] and matrix["farthest"] is None
    return f"the noise of its {matrix['matrix']} matrix cannot be computed" if is_open else ""


def _is_noise(matrix: Mapping[str, Any], router: str, limits: Limits) -> bool:
    if matrix["correlation"] <= limits("correlation", router):
        return False
    return not matrix["is_resolved"] or matrix["farthest"] <= limits("standard_errors", router)


def _title(matrices: Sequence[Mapping[str, Any]]) -> str:
    number = number_of(matrices[0]["num_experts"], "expert")
    if any(matrix["is_resolved"] for matrix in matrices):
        return f"its {number} differ by no more than initial noise."
    return f"its {number} are copies up to the last digits of their storage."


def _told(matrix: Mapping[str, Any]) -> str:
    """The evidence of one matrix."""
    share = f"{100.0 * matrix['upcycled_share']:.4g} %"
    text = (
        f"{matrix['matrix'].capitalize()} matrix: {share} of the weights is common to all, "
        f"correlation of two experts {matrix['correlation']:.4f}, deviation "
        f"{matrix['deviation']:.3g}"
    )
    if matrix["kurtosis"] is None:
        return f"{text}, beside a spacing of stored numbers of {matrix['step']:.3g}."
    return (
        f"{text}, at most {matrix['farthest']:.1f} standard errors from normal noise; largest "
        f"singular value {matrix['edge_ratio']:.3f} of that of noise."
    )


CHECK = Check(
    "MGG208",
    "experts differ by no more than initial noise",
    "warning",
    _judge,
    limits=(
        Limit("correlation", 0.1, "mean correlation of two experts above which they are copies"),
        Limit(
            "standard_errors",
            4.0,
            "largest distance of their differences from normal noise",
            basis="definition",
        ),
    ),
    inputs="experts",
    alike=same_sentence,
    severities={"release": "error", "training": "note"},
)
