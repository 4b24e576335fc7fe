"""Results as a document: trust, verdict, findings worst first, layers, what was not checked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moegeom.core.finding import MOST_FAIR_SHARES, SEVERITY_ORDER
from moegeom.core.text import half_width, number_of, percent, these
from moegeom.document.drawing import figures_of
from moegeom.document.excerpts import in_part
from moegeom.document.header import header, recording_hint, skipped
from moegeom.document.model import (
    Block,
    Document,
    Excerpt,
    Fact,
    Gallery,
    Headline,
    Look,
    Note,
    Table,
    View,
)
from moegeom.document.place import span
from moegeom.document.rule_words import rule_facts
from moegeom.document.sparkline import MARK, bar
from moegeom.document.summary import Summary, summarise
from moegeom.document.verdict_blocks import findings_excerpt
from moegeom.results.reader import Results
from moegeom.results.run_file import num_non_finite
from moegeom.results.schema import OF_FIGURES


def results_document(results: Results, view: View) -> Document:
    """What ``moegeom scan`` and ``moegeom report`` say."""
    summary = summarise(results)
    notes = [*map(Note, _notes(summary, False))]
    whole = [*map(Note, _notes(summary, True))]
    unchecked = "Not checked: expert weights, other engines, quantised activations."
    ending = [*map(Note, (*_limits(summary), unchecked, *skipped(summary)))]
    no_tokens = summary.run["tokens"] is None
    labels = ("routers", "rule", "tokens") if no_tokens else ("routers", "tokens", "trust")
    return Document(
        "scan",
        summary.run["checkpoint"]["name"],
        [
            _verdict(summary),
            [*header(summary, *labels), Fact("results", results.name)],
            findings_excerpt(summary.findings, summary.run, view.detail),
            [layer_excerpt(summary, view.detail)],
            [Gallery(lambda: figures_of(results))],
            [
                *ending,
                in_part(
                    whole if view.detail else notes, "note", view.detail, page=whole, is_aside=True
                ),
            ],
        ],
        lambda: results_record(results),
    )


def _verdict(summary: Summary) -> Sequence[Block]:
    errors, warnings = summary.count("error"), summary.count("warning")
    counted = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((errors, "error"), (warnings, "warning"))
    ]
    look: Look = "error" if errors else "warning" if warnings else "good"
    verdict = Fact("VERDICT", f"{', '.join(counted)}; {summary.remainder}", look)
    return [verdict, Headline([*_headline(summary)])]


#: Columns of a headline by their headings: what the figure is of, and the codes of findings that
#: give it their look.
_HEADLINE = {
    "max load /": ("of an even share: the busiest expert", ("MGB202", "MGB203")),
    "dead": ("dead experts", ("MGB201",)),
    "flip under": ("of the tokens flip under bf16 rounding", ("MGN301",)),
    "longest": ("of the median length: the longest row", ("MGG203",)),
    "zero": ("zero rows", ("MGI103",)),
    "dup.": ("duplicate rows", ("MGI104",)),
}


def _headline(summary: Summary) -> Iterator[tuple[str, str, Look]]:
    """The worst layer of the first three of these columns that the results have."""
    columns = {column.heading[0]: column for column in layer_columns(summary)}
    for head in [head for head in _HEADLINE if head in columns][:3]:
        column, (text, codes) = columns[head], _HEADLINE[head]
        values = {
            row["router"]: v for row in summary.layers if (v := column.value(row)) is not None
        }
        worst = max(values, key=lambda router: values[router])
        where = f", layer {summary.place(worst)}" if len({*values.values()}) > 1 else ""
        severities = {finding.severity for finding in summary.findings if finding.code in codes}
        looks: list[Look] = [LOOKS[one] for one in LOOKS if one in severities]
        look: Look = looks[0] if looks else "plain"
        yield column.text(values[worst]), f"{text}{where}", look


def _limits(summary: Summary) -> list[str]:
    run = summary.run
    if run["tokens"] is None:
        return [
            "Unknown without tokens: load, dead experts on data, margins and boundary distances.",
            "Weights alone cannot tell: they depend on where the tokens of this model lie.",
            f"To record tokens: {recording_hint(run['routers'])}",
        ]
    documents = run["tokens"]["num_documents"]
    lost, total = num_non_finite(run), run["tokens"]["num_tokens"]
    if total and lost == total:
        return ["Not one token is finite: nothing is known of load, margins and distances."]
    basis = these(total - lost, "token") if documents is None else these(documents, "document")
    return [f"Measured on {basis}. A flip is not by itself a worse output."]


def _notes(summary: Summary, are_whole: bool) -> list[str]:
    """Why figures are missing, where there are tokens to have them of; whole with their names."""
    if summary.run["tokens"] is None:
        return []
    lines = []
    for note in summary.notes:
        where = f", {summary.places(note.routers)}" if note.routers else ""
        names = f" They are {note.detail}" if are_whole and note.detail else ""
        lines.append(f"Note{where}: {note.title}{names}")
    return lines


def results_record(results: Results) -> Mapping[str, Any]:
    """Facts of the run, and every table but the rows per token and what figures are drawn from."""
    name = None if results.path is None else results.path.name
    facts = {"run": results.run, "results": name, **rule_facts(results.run)}
    tables = [table for table in results.tables() if table not in OF_FIGURES]
    return facts | {table: results.rows(table) for table in tables}


# ---------------------------------------------------------------------------------- table of layers
Row = Mapping[str, Any]

#: Checkpoints up to this many layers are shown whole.
SHORT = 12

#: Lines of a long checkpoint, the worst of it: at most, and where a screen has no room for them.
MOST_LINES = 10
LEAST_LINES = 3


@dataclass(frozen=True)
class LayerColumn:
    """A column: two lines of heading, the figure, and its text.

    On a narrow screen the columns with the highest ``drop`` go first; those with 0 stay.
    """

    heading: tuple[str, str]
    value: Callable[[Row], float | None]
    text: Callable[[float], str]
    error: Callable[[Row], float | None] = lambda row: None
    drop: int = 0


def _column(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(name)


def _load(row: Row) -> float | None:
    vio = row.get("max_vio_global")
    return None if vio is None else 1.0 + vio


def _short(value: float, digits: int) -> str:
    """Fixed digits without the zero before the point, as tables of shares are set."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def _share(value: float) -> str:
    """A share as a percentage with two significant figures."""
    return percent(value, ".1f" if value < 0.1 else ".0f")


TOKEN_COLUMNS = (
    LayerColumn(("max load /", "mean load"), _load, lambda v: f"{v:.1f}x"),
    LayerColumn(("dead", "exp."), _column("num_dead"), lambda v: f"{v:.0f}"),
    LayerColumn(
        ("load CV", "+- 95 %"),
        _column("load_cv_ddof0"),
        lambda v: _short(v, 2),
        error=_column("load_cv_ddof0_se"),
    ),
    LayerColumn(
        ("entropy", "of 1"), _column("load_entropy_normalised"), lambda v: _short(v, 2), drop=2
    ),
    LayerColumn(("margin", "median"), _column("margin_p50"), lambda v: _short(v, 3), drop=1),
    LayerColumn(("flip under", "bf16 rounding"), _column("bf16_flip_share_isotropic"), _share),
)

WEIGHT_COLUMNS = (
    LayerColumn(("row norm", "median"), _column("row_norm_median"), lambda v: f"{v:.3g}"),
    LayerColumn(
        ("longest", "of median"), _column("row_norm_max_over_median"), lambda v: f"{v:.2f}x"
    ),
    LayerColumn(("zero", "rows"), _column("num_zero_rows"), lambda v: f"{v:.0f}"),
)

DUPLICATES = LayerColumn(("dup.", "rows"), _column("num_duplicate_rows"), lambda v: f"{v:.0f}")


#: How a layer looks that has a finding, and what stands behind it.
LOOKS: dict[str, Look] = {"error": "error", "warning": "warning"}
_WORDS = {"error": "ERROR", "warning": "warn"}


@dataclass(frozen=True)
class _Line:
    """Layers that follow each other and of which the same is said; ``numbers`` count from 0.

    ``rank`` is smaller the sooner they are shown: the worst layer of each finding, then by what
    their own finding weighs, then by the figure that is told first.
    """

    name: str
    numbers: tuple[int, ...]
    cells: tuple[str, ...]
    severity: str
    rank: tuple[bool, int, float]


def layer_excerpt(summary: Summary, detail: bool) -> Excerpt:
    """Layers with findings first, those alike together; the worst of them where there are many.

    Beside the load of the busiest expert a screen has a bar.
    """
    columns = layer_columns(summary)
    each = [
        _line(summary, columns, number, row, has_bars=True)
        for number, row in enumerate(summary.layers)
    ]
    bare = [
        _line(summary, columns, number, row, has_bars=False)
        for number, row in enumerate(summary.layers)
    ]
    page = [_table(summary, columns, bare, bare, has_anchors=True)]
    has_loads = any(_load(row) is not None for row in summary.layers)
    legend = [Note(_LEGEND)] if has_loads else []
    if detail:
        return Excerpt([_table(summary, columns, each, each), *legend], page)
    lines = _grouped(summary, each)
    most = len(lines) if len(lines) <= SHORT else MOST_LINES
    first, *shorter = (
        [_table(summary, columns, lines, sorted(lines, key=lambda line: line.rank)[:n]), *legend]
        for n in range(most, min(most, LEAST_LINES) - 1, -1)
    )
    return Excerpt(first, page, shorter=shorter)


#: What bars are: their end, and the line across them.
_LEGEND = f"Bars of load end at the limit, {MOST_FAIR_SHARES:g}x; {MARK} marks the mean, 1x."


def layer_columns(summary: Summary) -> tuple[LayerColumn, ...]:
    """Of tokens where there are some, else of weights; none that no layer has."""
    names = ("load_cv_ddof0", "margin_p50")
    has_tokens = any(row.get(name) is not None for row in summary.layers for name in names)
    columns = (*(TOKEN_COLUMNS if has_tokens else WEIGHT_COLUMNS), DUPLICATES)
    return tuple(c for c in columns if any(c.value(row) is not None for row in summary.layers))


def _line(
    summary: Summary, columns: Sequence[LayerColumn], number: int, row: Row, has_bars: bool
) -> _Line:
    finding = summary.worst.get(row["router"])
    severity = finding.severity if finding else ""
    cells = (*(_cell(column, row, has_bars) for column in columns), _WORDS.get(severity, ""))
    is_named = any(f.routers[:1] == (row["router"],) for f in summary.findings)
    leading = _load(row) or row.get("row_norm_max_over_median") or 0.0
    rank = (not is_named, SEVERITY_ORDER.get(severity, len(SEVERITY_ORDER)), -leading)
    return _Line(summary.place(row["router"]), (number,), cells, severity, rank)


def _grouped(summary: Summary, lines: Sequence[_Line]) -> list[_Line]:
    """Layers that follow each other with the same cells become one line: ``3-7 (5)``."""
    groups: list[_Line] = []
    for _, alike in itertools.groupby(lines, key=lambda line: (line.cells, line.severity)):
        first, *others = alike
        if others:
            routers = [summary.layers[line.numbers[0]]["router"] for line in (first, *others)]
            first = dataclasses.replace(
                first,
                name=f"{span(routers, first.name)} ({len(routers)})",
                numbers=tuple(line.numbers[0] for line in (first, *others)),
                rank=min(line.rank for line in (first, *others)),
            )
        groups.append(first)
    return groups


def _table(
    summary: Summary,
    columns: Sequence[LayerColumn],
    lines: Sequence[_Line],
    chosen: Sequence[_Line],
    has_anchors: bool = False,
) -> Table:
    """The chosen lines, those with findings first, and quantiles over all layers."""
    ranked = sorted(chosen, key=lambda line: (line.rank[1], line.numbers))
    rows = [[line.name, *line.cells] for line in ranked]
    looks: list[Look] = [LOOKS.get(line.severity, "plain") for line in ranked]
    if len(summary.layers) > 1:
        number = number_of(len(summary.layers), "layer")
        measured = sum(columns[0].value(row) is not None for row in summary.layers)
        number = f"{measured} of {number}" if 0 < measured < len(summary.layers) else number
        rows.append(["median", *(_quantile(c, summary.layers, (50,)) for c in columns), number])
        rows.append(["p5-p95", *(_quantile(c, summary.layers, (5, 95)) for c in columns), ""])
        looks.extend(("dim", "dim"))
    if summary.random:
        rows.append(["random", *(_quantile(c, summary.random, (50,)) for c in columns), "routers"])
        looks.append("dim")
    headings = (("layer", ""), *(column.heading for column in columns), ("verdict", ""))
    hidden = sum(len(line.numbers) for line in lines) - sum(len(line.numbers) for line in ranked)
    return Table(
        [list(line) for line in zip(*headings, strict=True)],
        rows,
        looks,
        left=(0, len(headings) - 1),
        drops=(0, *(column.drop for column in columns), 0),
        gap=3,
        heads_look="strong",
        rest=f"and {number_of(hidden, 'more layer')}: --detail" if hidden else "",
        anchors=[f"layer-{line.numbers[0]}" for line in ranked] if has_anchors else (),
    )


def _cell(column: LayerColumn, row: Row, has_bars: bool) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    text, error = column.text(value), column.error(row)
    if error is not None:
        text += f" +-{_short(half_width(error, row.get('num_blocks')), 2)}"
    if has_bars and column.value is _load:
        text = f"{bar(value, MOST_FAIR_SHARES)} {text:>5}"
    return text


def _quantile(column: LayerColumn, rows: Sequence[Row], _shareiles: tuple[int, ...]) -> str:
    values = [value for row in rows if (value := column.value(row)) is not None]
    if not values:
        return "-"
    low, *high = (column.text(v) for v in np.percentile(values, _shareiles).tolist())
    return f"{low.removesuffix(' %')}-{high[0]}" if high else low
