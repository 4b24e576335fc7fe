"""Writes a page per metric, from its docstring, its columns and the samples.

`make docs` has it scan the sample checkpoints with their recordings (half a minute) and draw the
pictures; nothing of it is in the repository.
"""

from __future__ import annotations

import math
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from moegeom.core.metric import Column, Metric
from moegeom.core.row_keys import under_random
from moegeom.core.text import half_width
from moegeom.core.tokens import InputNoise
from moegeom.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "metrics"
SAMPLES = ROOT / "sample_ckpts"

#: Checkpoints of the examples: the training series, and the one with groups and a selection bias.
STEPS = {
    "olmoe-balanced": (100, 300, 600, 1000, 1500),
    "olmoe-collapsed": (100, 600, 1500),
    "deepseek-tiny": (1500,),
}

#: Layer shown in the examples, by model.
ROUTERS = {"olmoe-balanced": "text/1", "olmoe-collapsed": "text/1", "deepseek-tiny": "text/2"}

#: The arithmetic of the examples of metrics that compare two choices.
VARIANT = "bf16-logits"

#: The noise of the examples of metrics that need some: 2 % of the rms of each input.
NOISE = InputNoise(0.02)

#: Begins the part of a page that comes from a scan.
EXAMPLE = "## On the samples"

#: Pictures of tables other than ``layers``: (table, x, y, which rows, is x logarithmic).
CURVES = {
    "boundary_distance": ("margins", "threshold", "share_below", "boundary_distance", True),
    "margins": ("margins", "threshold", "share_below", "margin", True),
    "noise_sigmas": ("margins", "threshold", "share_below", "noise_sigmas", True),
    "pre_norm_angle": ("margins", "threshold", "share_below", "pre_norm_angle", True),
    "rounding_noise": ("margins", "threshold", "share_below", "rounding_sigmas", True),
    "tropical_saturation": (
        "margins",
        "threshold",
        "share_below",
        "boundary_distance_over_norm",
        True,
    ),
    "capacity": ("capacity", "capacity_factor", "dropped_slot_share", None, False),
}

#: The column that a picture over the training steps shows, where it is not the first one.
SHOWN = {
    "load": "max_vio_global",
    "reachability": "num_reachable",
    "directions": "mean_pairwise_cosine",
    "effective_router": "gram_score_centred",
    "agreement": "num_reproduced",
    "storage": "levels_share",
    "coactivation": "overlap_routing",
    "top1": "first_choice_repeat",
    "neighbours": "neighbour_overlap",
    "rows": "row_norm_median",
    "selection_bias": "bias_range",
    "intrinsic_dimension": "intrinsic_dimension_two_nn",
    "jump": "jump_over_output_p50",
}

#: The same at every step, or known at one step only: numbers say it better.
NO_PICTURE = {
    "agreement",
    "distance_bracket",
    "exact_ties",
    "group_load",
    "reachability",
    "selection_bias",
    "storage",
    "flip_jump",
    "flips",
    "tokens",
    "swaps",
    "weight_moved",
}


#: What each scope means.
SCOPES = {
    "weights": "the weights alone",
    "router": "tokens at a router",
    "flip": "tokens at a router under a variant (`moegeom boundary-report`)",
    "noise": "tokens at a router, inputs disturbed (`moegeom boundary-report --noise`)",
    "exposure": "tokens at a router, what would flip (`moegeom boundary-report`)",
    "jump": "tokens at a router and its experts (`moegeom boundary-report --experts`)",
    "flip_jump": "tokens at a router under a variant, and its experts (`--experts`)",
    "harm": "tokens that were flipped in the running model (`moegeom capture --flips`)",
}


def reference(metric: Metric) -> str:
    """The part of a page that follows from the code: statement, columns, needs."""
    words = [textwrap.fill(text, 100, break_on_hyphens=False) for text in metric.page.split("\n\n")]
    lines = [f"# `{metric.name}`", "", "\n\n".join(words), ""]
    for table in metric.columns:
        columns = metric.columns[table]
        lines += [f"## Columns of `{table}`", "", "| column | unit | what it is | formula |"]
        lines += ["|---|---|---|---|", *(_column(column) for column in columns), ""]
    held = ", ".join(metric.invariances).replace("_", " ") or "nothing that is declared"
    needs = ", ".join(f"`{need}`" for need in metric.needs) or "nothing but the weights"
    facts = f"Needs {needs}. Unchanged by: {held}. Version {metric.version}."
    lines += [f"Scope: {SCOPES[metric.scope]}. {facts}", ""]
    return "\n".join(lines)


def _column(column: Column) -> str:
    name = f"`{column.name}`" + (" +- `_se`" if column.has_se else "")
    link = f"[{column.formula}](../formulas.md#{column.formula})" if column.formula else ""
    return f"| {name} | {column.unit} | {column.text.replace('|', chr(92) + '|')} | {link} |"


def index() -> str:
    """The list of pages."""
    lines = [
        "# Metrics",
        "",
        "What `moegeom scan` measures, one page each, and `moegeom boundary-report` beside it.",
        "`moegeom list metrics` lists",
    ]
    lines += ["every column; [formulas](../formulas.md) define them.", ""]
    lines += ["| metric | what it is |", "|---|---|"]
    lines += [f"| [{m.name}]({m.name}.md) | {m.text} |" for m in METRICS.all()]
    return "\n".join(lines) + "\n"


def measure(folder: Path) -> dict[tuple[str, int], dict[str, list[dict]]]:
    """Tables of every step of the samples."""
    from moegeom.pipeline import ScanRequest, scan
    from moegeom.results.reader import open_results

    tables = {}
    for model, steps in STEPS.items():
        for step in steps:
            out = folder / f"{model}-{step}"
            checkpoint = SAMPLES / model / f"step_{step}"
            tokens = str(SAMPLES / model / "rec" / f"step_{step}")
            request = ScanRequest(
                str(checkpoint),
                out,
                tokens=tokens,
                arithmetics=(VARIANT,),
                noise=NOISE,
                experts=True,
            )
            results = open_results(scan(request))
            tables[model, step] = {name: results.rows(name) for name in results.tables()}
    return tables


def _rows(tables: dict, model: str, step: int, table: str, variant: str) -> Iterator[dict]:
    for row in tables[model, step].get(table, ()):
        if (row["router"], row["variant"], row["population"]) == (ROUTERS[model], variant, "all"):
            yield row


def example(metric: Metric, tables: dict, picture: str) -> str:
    """Values on the last step of each sample, beside the random router where there is one."""
    lines = [EXAMPLE, ""]
    shown = [
        ("olmoe-balanced", "as_stored"),
        ("olmoe-balanced", "random"),
        ("olmoe-collapsed", "as_stored"),
        ("deepseek-tiny", "as_stored"),
    ]
    under = ""
    if metric.scope in ("flip", "flip_jump"):
        names = {"as_stored": VARIANT, "random": under_random(VARIANT)}
        shown = [(model, names[variant]) for model, variant in shown]
        under = f" under `{VARIANT}`"
    columns = [c for c in metric.columns.get("layers", ()) if c.kind != "list"]
    if columns:
        said = f"One layer of each sample at its last step{under}, with 95 % ranges over documents."
        lines += [said, ""]
        lines += ["| column | balanced | random router | collapsed | deepseek-tiny |"]
        lines += ["|---|---|---|---|---|"]
        rows = [next(_rows(tables, m, 1500, "layers", v), {}) for m, v in shown]
        for column in columns:
            cells = [_cell(row, column) for row in rows]
            if any(cell != "-" for cell in cells):
                lines.append(f"| `{column.name}` | {' | '.join(cells)} |")
        lines.append("")
    if picture:
        lines += [f"![{metric.name} of the samples]({picture})", ""]
    return "\n".join(lines)


def _cell(row: dict, column: Column) -> str:
    value, error = row.get(column.name), row.get(f"{column.name}_se")
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.3g}"
    return (
        text
        if error is None or math.isinf(value)
        else f"{text} +- {half_width(error, row.get('num_blocks')):.2g}"
    )


def draw(metric: Metric, tables: dict) -> str:
    """Draws the picture of a metric; its file name, empty when there is nothing to draw."""
    import matplotlib as mpl

    if metric.name in NO_PICTURE:
        return ""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style = {"svg.hashsalt": "moegeom", "svg.fonttype": "none", "font.size": 9}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(5.4, 3.0), layout="constrained")
        has_lines = _curves(axis, metric, tables) or _steps(axis, metric, tables)
        if has_lines:
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=8)
            figure.savefig(PAGES / f"{metric.name}.svg", metadata={"Date": None})
        plt.close(figure)
    return f"{metric.name}.svg" if has_lines else ""


COLOURS = {"olmoe-balanced": "#2a6f97", "olmoe-collapsed": "#c1440e", "deepseek-tiny": "#5a7d2a"}


def _curves(axis, metric: Metric, tables: dict) -> bool:
    """A curve of another table, for the last step of each sample and a random router."""
    if metric.name not in CURVES:
        return False
    table, x, y, quantity, is_log = CURVES[metric.name]
    drawn = False
    for model, colour in COLOURS.items():
        for variant, dash in (("as_stored", "-"), ("random", ":")):
            rows = list(_rows(tables, model, 1500, table, variant))
            points = [
                (row[x], row[y])
                for row in rows
                if (quantity is None or row["quantity"] == quantity) and row[y] is not None
            ]
            if points:
                label = model if variant == "as_stored" else f"{model}, random router"
                axis.plot(*zip(*points, strict=True), dash, color=colour, lw=1.3, label=label)
                drawn = True
    if is_log:
        axis.set_xscale("log", base=2)
    axis.set_xlabel(x.replace("_", " "))
    axis.set_ylabel(y.replace("_", " "))
    return drawn


def _steps(axis, metric: Metric, tables: dict) -> bool:
    """A figure of every layer over the training steps."""
    columns = [c for c in metric.columns.get("layers", ()) if c.kind in ("float", "int")]
    if not columns:
        return False
    name = SHOWN.get(metric.name, columns[0].name)
    drawn = False
    for model, steps in STEPS.items():
        routers = list(dict.fromkeys(row["router"] for row in tables[model, 1500]["layers"]))
        for number, router in enumerate(routers):
            points = [
                (step, row[name], row.get(f"{name}_se") or 0.0)
                for step in steps
                for row in tables[model, step]["layers"]
                if (row["router"], row["variant"], row["population"])
                == (router, "as_stored", "all")
                and row.get(name) is not None
                and math.isfinite(row[name])
            ]
            if points:
                x, y, error = zip(*points, strict=True)
                label = model if number == 0 else None
                bars = [half_width(e, 16) for e in error]
                axis.errorbar(
                    x, y, bars, color=COLOURS[model], marker="o", ms=3, lw=1.1, label=label
                )
                drawn = True
    axis.set_xlabel("training step")
    axis.set_ylabel(name.replace("_", " "))
    return drawn


def write() -> None:
    PAGES.mkdir(exist_ok=True)
    (PAGES / "README.md").write_text(index(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        tables = measure(Path(folder))
    for metric in METRICS.all():
        examples = example(metric, tables, draw(metric, tables))
        text = re.sub(r"\n{3,}", "\n\n", f"{reference(metric)}\n{examples}").rstrip() + "\n"
        (PAGES / f"{metric.name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
