"""The screen: what was read, the verdict, a line for each variant, the worst layers and pairs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from moegeom.core.variant_names import SIDES
from moegeom.document._reporter import Reporter, View
from moegeom.document.header import routers_line, rule_line, skipped, tokens_line, trust_line
from moegeom.document.screen import STYLES, command, hanging, labelled, titled, to_text, wrapped
from moegeom.document.untrusted import printable
from moegeom.studies.boundary.record import Exposure, VariantExposure
from moegeom.studies.boundary.screen._shares import certain, percent
from moegeom.studies.boundary.screen._sides import near_line, next_line, shift_line, side_lines
from moegeom.studies.boundary.screen._wording import (
    distances,
    limits,
    noise_lines,
    remarks,
    traders,
    verdict,
    worst_layers,
)

_HEADINGS = (
    ("how exposed?", "choices switched", "", "", "tokens with", "weight", "kept for"),
    ("", "mean", "random", "worst layer", "any switch", "moved", "certain"),
)


def render(exposure: Exposure, view: View) -> str:
    """The screen as text of at most ``view.width`` columns, with colour codes if wanted."""
    exposure = printable(exposure)
    parts = (
        _header(exposure, view.width),
        _verdict(exposure, view.width),
        _variants(exposure, view),
        _details(exposure, view),
        _ending(exposure, view.width),
    )
    lines: list[Text] = []
    for part in parts:
        lines += [Text(), *part] if lines and part else part
    return to_text(lines, view)


def _header(exposure: Exposure, width: int) -> list[Text]:
    summary = exposure.summary
    return [
        *titled(summary.run["checkpoint"]["name"], rule_line(summary), width),
        *labelled("routers", routers_line(summary), width),
        *labelled("tokens", tokens_line(summary), width),
        *labelled("trust", trust_line(summary), width),
        *(line for label, text in side_lines(exposure) for line in labelled(label, text, width)),
    ]


def _verdict(exposure: Exposure, width: int) -> list[Text]:
    lines = labelled("VERDICT", verdict(exposure), width)
    for sentence in distances(exposure):
        lines += labelled("", sentence, width)
    typed = next_line(exposure)
    return [*lines, command("next: ", typed)] if typed else lines


def _variants(exposure: Exposure, view: View) -> list[Text]:
    rows = [*_HEADINGS, *(_cells(exposure, variant) for variant in exposure.variants)]
    widths = [max(len(row[column]) for row in rows[1:]) for column in range(len(rows[1]))]
    widths[0] = max(widths[0], len(_HEADINGS[0][0]))
    for column in (4, 5, 6):  # headings of one column each
        widths[column] = max(widths[column], len(_HEADINGS[0][column]))
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        if number == 0:  # one heading over three columns
            cells[1:4] = [row[1].ljust(sum(widths[1:4]) + 4)]
        text = "  ".join(cells).rstrip()
        lines.append(Text(text, style="dim" if number < len(_HEADINGS) else ""))
    if max(len(line) for line in lines) > view.width:
        return _paragraphs(exposure, view.width)
    return lines


def _paragraphs(exposure: Exposure, width: int) -> list[Text]:
    """The same figures where the table is too wide: a paragraph for each variant."""
    lines = []
    for variant in exposure.variants:
        name, mean, random, worst, some, moved, kept = _cells(exposure, variant)
        text = (
            f"{mean} of the choices switch (random router {random}, worst {worst}), {some} of the "
            f"tokens somewhere; {moved} of the weight moves; {kept} are kept for certain."
        )
        lines += hanging(f"  {name:<12}  ", text, width, "bold")
    return lines


def _cells(exposure: Exposure, variant: VariantExposure) -> Sequence[str]:
    worst = variant.worst
    place = exposure.summary.place(worst["router"])
    return (
        f"  {variant.name}",
        percent(variant.mean("switched_share")),
        percent(variant.null_share),
        f"{percent(worst['switched_share'])}  {'L' if place.isdigit() else ''}{place}"
        if worst["switched_share"]
        else "-",
        percent(variant.any_share),
        percent(variant.mean("weight_moved_mean")),
        "-" if variant.name in SIDES else certain(variant.mean("proved_share")),
    )


def _details(exposure: Exposure, view: View) -> list[Text]:
    shown = [variant for variant in exposure.variants if variant.mean("switched_share")]
    sides = [variant for variant in shown if variant.name in SIDES]
    if not view.all_layers and sides:
        shown = sides
    elif not view.all_layers:
        shown = sorted(shown, key=lambda v: -(v.mean("switched_share") or 0.0))[:1]
    lines: list[Text] = []
    for sentence in noise_lines(exposure):
        lines += hanging("noise    ", sentence, view.width, "dim")
    for variant in shown:
        head = f"{variant.name}: "
        lines += hanging("worst    ", head + worst_layers(exposure, variant), view.width, "dim")
        if variant in sides and (near := near_line(variant)):
            lines += hanging("margins  ", head + near, view.width, "dim")
        if shift := shift_line(exposure, variant):
            lines += hanging("load     ", head + shift, view.width, "dim")
        if variant.trades:
            lines += hanging("trading  ", head + traders(exposure, variant), view.width, "dim")
    return lines


def _ending(exposure: Exposure, width: int) -> list[Text]:
    said = [*remarks(exposure), *limits(), *skipped(exposure.summary)]
    return [Text(part, style=STYLES["summary"]) for text in said for part in wrapped(text, width)]


REPORTER = Reporter("table", render)
