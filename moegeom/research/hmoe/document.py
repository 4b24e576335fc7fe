"""Gated attention as a mixture, as a document: what data can tell of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from moegeom.core.text import figure_text, number_of
from moegeom.document.model import Block, Document, Fact, Table, Title, View
from moegeom.document.study import page
from moegeom.geometry.hmoe import Position
from moegeom.research.hmoe.record import Mixtures, Model, PositionRank

#: What positions are called on the screen; G1 to G5 as papers number them.
_POSITIONS: Mapping[Position, str] = {
    "none": "none (MHA)",
    "query_or_key": "queries or keys (G3, G4)",
    "value": "values (G2, Setting I)",
    "sdpa": "attention (G1, Setting II)",
    "output": "output (G5)",
    "gate_per_head": "a gate for each head",
    "gate_per_channel": "a gate for each channel",
}

_MODELS: Mapping[Model, str] = {"mha": "MHA", "1": "Setting I", "2": "Setting II"}

_HEADS = ("non-linearity", "parameters", "rank", "flat", "free", "last | next")

#: Singular values below this share of the largest are what float64 makes of 0.
_ROUNDING = 1e-12


def document(report: Mixtures, view: View) -> Document:
    """What ``moegeom research hmoe`` says."""
    return page(
        "research hmoe",
        "hmoe",
        view,
        [Title("hmoe", "what data can tell of the parameters of gated attention.")],
        [*_results(report)],
        [_rank_table(report)],
        notes=_notes(),
        record=lambda: dataclasses.asdict(report),
    )


def _results(report: Mixtures) -> Iterator[Block]:
    number = sum(rank.beyond == 0 for rank in report.ranks)
    places = number_of(len(report.ranks), "place")
    text = f"{number} of {places} of a non-linearity leave nothing free but what scores share."
    yield Fact("RESULT", text, "strong")
    medians = ", ".join(
        f"{figure_text(one.median)} ({_MODELS[one.model]})" for one in report.deviations
    )
    text = f"At n = {report.deviations[0].size:,} every unbiased estimator has a median standard "
    yield Fact("", f"{text}deviation of {medians} or more, for parameters of 2 at most.")
    if report.unmet:
        text = f"These parameters do not meet {' and '.join(report.unmet)} of S2's assumptions."
        yield Fact("", text, "warning")


def _rank_table(report: Mixtures) -> Table:
    rows = [
        (
            *(_name(rank), f"{rank.parameters}", f"{rank.rank}", f"{rank.gauge + rank.beyond}"),
            *(f"{rank.beyond}", f"{_share(rank.least)} | {_share(rank.rest)}"),
        )
        for rank in report.ranks
    ]
    return Table([_HEADS], rows, ["plain" if rank.beyond else "strong" for rank in report.ranks])


def _share(value: float) -> str:
    return "0" if value < _ROUNDING else f"{value:.0e}"


def _name(rank: PositionRank) -> str:
    if rank.activation == "sigmoid":
        return _POSITIONS[rank.position]
    return f"{_POSITIONS[rank.position].partition(' ')[0]}, {rank.activation}"


def _notes() -> Iterator[str]:
    yield (
        "flat: directions of the parameters of S2 in which f stays as it is. free: flat beyond "
        "what all scores of a head share. last | next: singular values on both sides of the rank, "
        f"over the largest; 0 is below {_ROUNDING:.0e}, rounding."
    )
    yield (
        "Released models multiply by a sigmoid of their input (the gates), which is not what S2 "
        "studies. One for each channel leaves only scales free; one for each head leaves its "
        "channels mixed."
    )
