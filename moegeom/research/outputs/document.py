"""Outputs of experts as a document: constant part, overlap of experts, share of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from moegeom.core.text import figure_text, percent
from moegeom.document.chart import Axis, Chart, Heat, Panel, padded
from moegeom.document.excerpts import in_part, worst_excerpt
from moegeom.document.header import size
from moegeom.document.model import Block, Document, Fact, Gallery, Table, View
from moegeom.document.place import place
from moegeom.document.study import Column, left_out_facts, study_page, study_summary, table_of
from moegeom.research.outputs.record import ExpertOutput, Outputs, RouterOutputs

#: Figure, the line above it and its heading, and when a narrow screen does without it.
_COLUMNS: tuple[Column, ...] = (
    ("mean length", "routed", 0, lambda one: _length(one.routed_norm)),
    ("", "shared", 2, lambda one: _length(one.shared_norm)),
    ("share in the mean", "routed", 0, lambda one: _share(one.routed_mean_share)),
    ("", "shared", 0, lambda one: _share(one.shared_mean_share)),
    ("cosine of two", "chosen", 0, lambda one: _figure(one.overlap)),
    ("", "centred", 0, lambda one: _figure(one.overlap_centred)),
    ("", "adds up", 0, lambda one: _figure(one.adds_up)),
    ("added, by expert", "most", 0, lambda one: _added(one.chosen[0])),
    ("", "least", 1, lambda one: _added(one.chosen[-1])),
)

#: Of any two experts.
_EVERY_COLUMNS: tuple[Column, ...] = (
    ("cosine of any two experts", "on one token", 0, lambda one: _figure(one.overlap_every)),
    ("", "centred", 0, lambda one: _figure(one.overlap_every_centred)),
    (
        "experts",
        "not chosen by any token",
        0,
        lambda one: f"{sum(expert.num_tokens == 0 for expert in one.experts):,}",
    ),
    ("", "read", 0, lambda one: size(one.num_bytes)),
)

#: Of one expert.
_EXPERT_COLUMNS: tuple[Column, ...] = (
    ("", "expert", 0, lambda of: f"{of[1].expert}"),
    ("", "tokens", 0, lambda of: f"{of[1].num_tokens:,}"),
    ("", "mean weight", 0, lambda of: _length(of[1].weight)),
    ("", "length of its output", 0, lambda of: _length(of[1].output_norm)),
    ("", "of what it adds", 0, lambda of: _length(of[1].contribution_norm)),
    ("", "share of energy", 0, lambda of: _share(of[1].energy_share)),
)


def document(report: Outputs, view: View) -> Document:
    """What ``moegeom research outputs`` says."""
    every = [table_of([_layer(report), *_EVERY_COLUMNS], report.routers)]
    every = every if report.every_expert else []
    layers = worst_excerpt(
        report.routers,
        lambda one: one.routed_mean_share,
        view,
        partial(_layers, report),
        *every,
        _experts(report),
    )
    return study_page(
        report,
        "research outputs",
        view,
        [Gallery(lambda: [*outputs_figures(report)])],
        [layers],
        [in_part(every, "line", view.detail, page=[])] if every else [],
        verdict=_verdict(report),
        sample=f"Experts read: {size(sum(one.num_bytes for one in report.routers))}.",
        notes=_notes(report),
    )


def _verdict(report: Outputs) -> Iterator[Block]:
    """The range over layers of three figures; nothing is good or bad here."""
    yield Fact(
        "RESULT",
        f"{_range([one.routed_mean_share for one in report.routers], _share)} of the energy of "
        "routed outputs is in their mean; two chosen experts of one token have a cosine of "
        f"{_range([one.overlap for one in report.routers], _figure)}.",
        "strong",
    )
    shared = [
        one.shared_energy_share for one in report.routers if one.shared_energy_share is not None
    ]
    if shared:
        means = [
            one.shared_mean_share for one in report.routers if one.shared_mean_share is not None
        ]
        yield Fact(
            "",
            f"Shared experts give {_range(shared, _share)} of the energy of the sum, and "
            f"{_range(means, _share)} of theirs is their mean.",
        )
    yield from left_out_facts(report, what="not computed")


def _range(values: Sequence[float], text_of: Any) -> str:
    numbers = sorted(value for value in values if not math.isnan(value))
    if not numbers:
        return "-"
    low, high = text_of(numbers[0]), text_of(numbers[-1])
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else percent(value)


def _figure(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:z.2f}"


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _layers(report: Outputs, routers: Sequence[RouterOutputs]) -> Table:
    """Without columns of shared experts where no layer has any."""
    has_shared = any(one.shared_norm is not None for one in report.routers)
    columns = [column for column in _COLUMNS if has_shared or column[1] != "shared"]
    return table_of([_layer(report), *columns], routers)


def _layer(report: Outputs) -> Column:
    summary = study_summary(report)
    return "", "layer", 0, lambda one: summary.place(one.router)


def _added(one: ExpertOutput) -> str:
    return f"{_length(one.contribution_norm)} ({one.expert})"


def _experts(report: Outputs) -> Table:
    """A line for each expert of each layer."""
    _, head, drop, place_of = _layer(report)
    experts = [(one, expert) for one in report.routers for expert in one.experts]
    return table_of([("", head, drop, lambda of: place_of(of[0])), *_EXPERT_COLUMNS], experts)


def _notes(report: Outputs) -> Iterator[str]:
    tokens, top_k = report.num_tokens, report.routers[0].top_k
    yield (
        "'share in the mean' is |mean y|^2 / mean |y|^2: 1 for a constant output, "
        f"{percent(1.0 / tokens)} for outputs of {tokens:,} tokens that have nothing in common."
    )
    errors = np.array([one.errors for one in report.routers])
    if np.isfinite(errors).all():
        share, cosine = errors.max(axis=0)
        yield (
            f"Standard errors over tokens: {percent(share)} of the share of routed outputs in the "
            f"mean, {figure_text(cosine)} of the cosine of two chosen, or less."
        )
    yield (
        "'chosen' are two chosen experts of one token; 'centred' less the mean output of each "
        "expert. 'adds up' is the length of the routed output over the lengths added: 1 where all "
        f"point the same way, {top_k**-0.5:.2f} for {top_k} orthogonal outputs of one length."
    )
    yield (
        "'added' is the mean length of output times routing weight over the tokens that chose an "
        "expert, and its number."
    )
    for reason in dict.fromkeys(one.shared for one in report.routers):
        names = [one.router for one in report.routers if one.shared == reason]
        if reason not in ("none", "computed"):
            places = study_summary(report).places(names)
            yield f"{places}: shared experts are not computed: {reason}"
    if report.written:
        yield _written(report)


def _written(report: Outputs) -> str:
    if not report.kinds:
        return f"A row for each expert of each layer written to {report.written}."
    kinds = ", ".join(kind.replace("_", " ") for kind in report.kinds)
    return (
        f"Recording with {kinds} written to {report.written}: moegeom scan CKPT --tokens "
        f"{report.written} adds columns for them."
    )


# ------------------------------------------------------------------------------------------ figures
def outputs_figures(report: Outputs) -> Iterator[Chart]:
    """One: the share of each expert in each layer, in shares of an even division."""
    routers = report.routers
    names = [place(each.router, [r.router for r in routers]) for each in routers]
    experts = max(router.num_experts for router in routers)
    shares = [[one.energy_share * r.num_experts for one in r.experts] for r in routers]
    heat = Heat(
        padded(shares, experts),
        "energy of the contributions, in shares of an even division",
        0.0,
        max(2.0, *(value for row in shares for value in row)),
        1.0,
    )
    layer = max(range(len(routers)), key=lambda i: max(shares[i]))
    most = max(routers[layer].experts, key=lambda one: one.energy_share)
    rows = [(router, one) for router in routers for one in router.experts]
    yield Chart(
        "energy",
        "Where the routed output comes from",
        "Squared length of what each expert adds (its output times the routing weight), summed "
        "over the tokens that chose it, beside an even division among all experts.",
        "Whether contributions cancel, and what the layers behind make of them.",
        f"Expert {most.expert} of layer {names[layer]} gives {percent(most.energy_share)} of the "
        "energy of its layer.",
        [
            Panel(
                "",
                Axis("expert", names=[str(e) for e in range(experts)]),
                Axis("layer", names=names),
                [heat],
            )
        ],
        [
            ("router", [router.router for router, _ in rows]),
            ("expert", [one.expert for _, one in rows]),
            ("num_tokens", [one.num_tokens for _, one in rows]),
            ("weight", [one.weight for _, one in rows]),
            ("output_norm", [one.output_norm for _, one in rows]),
            ("contribution_norm", [one.contribution_norm for _, one in rows]),
            ("energy_share", [one.energy_share for _, one in rows]),
        ],
    )
