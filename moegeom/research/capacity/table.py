"""``--out``: the counts, bounds and costs of each kind of layer as rows of one Parquet file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from moegeom.core.files import write_whole
from moegeom.core.text import integer_text
from moegeom.geometry.capacity import log10_count
from moegeom.research.capacity.record import (
    AtDimension,
    LayerCapacity,
    SplitExperts,
)

#: ``document`` is what a paper prints; the others hold.
Kind = Literal["exact", "upper_bound", "expected", "document"]

#: Columns: name, type as Arrow calls it, unit, text.
COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("router", "string", "", "routers of these sizes; missing for sizes that were typed"),
    ("quantity", "string", "", "what is counted"),
    ("data_dim", "int64", "dimensions", "of the affine set that the data lie on; missing: any"),
    ("split", "int64", "", "into how many parts each expert is cut; missing: not cut"),
    ("value", "string", "", "whole numbers in full, others in seven digits"),
    ("log10", "double", "", "decimal logarithm of the value; of a gain, that of the ratio"),
    ("kind", "string", "", "exact, upper_bound, expected, or document: as a paper prints it"),
    ("note", "string", "", "what to know of this row"),
)

_GATED = "sign patterns of the gate pre-activations, because gated experts are not piecewise linear"


def rows_of(layer: LayerCapacity) -> list[dict[str, Any]]:
    """Rows by the names of :data:`COLUMNS`."""
    return [
        {"router": layer.routers or None, **row}
        for part in (_sets(layer), _on_data(layer), _splits(layer), _costs(layer))
        for row in part
    ]


def write_table(out: Path, layers: Sequence[LayerCapacity]) -> None:
    """Writes the table atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from moegeom.results.reader import SCHEMA_VERSION

    rows = [row for layer in layers for row in rows_of(layer)]
    fields, arrays = [], []
    for column, spelled, unit, text in COLUMNS:
        kind = pa.type_for_alias(spelled)
        arrays.append(pa.array([row[column] for row in rows], type=kind))
        facts = {"text": text, "unit": unit}
        fields.append(pa.field(column, kind, metadata={k: v for k, v in facts.items() if v}))
    schema = pa.schema(fields, metadata={"moegeom_schema": str(SCHEMA_VERSION)})
    table = pa.Table.from_arrays(arrays, schema=schema)
    write_whole(out, lambda file: pq.write_table(table, file))


def _row(
    quantity: str,
    kind: Kind,
    value: float | None,
    note: str = "",
    *,
    data_dim: int | None = None,
    split: int | None = None,
    log10: float | None = None,
) -> dict[str, Any]:
    if log10 is None and value is not None and value > 0:
        log10 = log10_count(value) if isinstance(value, int) else math.log10(value)
    if isinstance(value, int):
        text = integer_text(value)
    else:
        text = None if value is None or not math.isfinite(value) else f"{value:.7g}"
    return {
        "quantity": quantity,
        "data_dim": data_dim,
        "split": split,
        "value": text,
        "log10": log10 if log10 is not None and math.isfinite(log10) else None,
        "kind": kind,
        "note": note or None,
    }


def _gain(
    quantity: str, kind: Kind, log10: float | None, note: str, **where: int
) -> dict[str, Any]:
    """A ratio that may be beyond float64: its logarithm, and its value where there is one."""
    value = None if log10 is None or not -300.0 < log10 < 300.0 else 10.0**log10
    return _row(quantity, kind, value, note, log10=log10, **where)


def _sets(layer: LayerCapacity) -> Iterator[dict[str, Any]]:
    yield _row("expert_sets", "exact", layer.num_sets)
    yield _row("hypersimplex_edges", "exact", layer.num_edges)
    yield _row("hypersimplex_facets", "exact", layer.num_facets)
    for n, count in enumerate(layer.faces):
        note = f"strata of order {n}: ties of {n + 1} experts" if n else "expert sets"
        yield _row(f"hypersimplex_faces_{n}", "exact", count, note)
    free = "dimension from which on the bound of cells allows every set"
    yield _row("free_from_dimension", "exact", layer.free_from, free)


def _on_data(layer: LayerCapacity) -> Iterator[dict[str, Any]]:
    for at in layer.at:
        for row in (*_cells(layer, at), *_regions(layer, at)):
            yield row | {"data_dim": at.dims}


def _cells(layer: LayerCapacity, at: AtDimension) -> Iterator[dict[str, Any]]:
    curved = "" if layer.is_linear else "of a linear router of these sizes; this one is not linear"
    reached = "attained by some rows and biases" if at.is_every_set_possible else ""
    yield _row("cells", "upper_bound", at.most_cells, "; ".join(filter(None, (reached, curved))))
    yield _row("cells_of_all_k", "exact", at.all_orders, "k = 0 to E, general position")
    slow = "not computed: too many dimensions for the integral" if at.expected_cells is None else ""
    yield _row("cells_of_a_gaussian_router", "expected", at.expected_cells, slow)


def _regions(layer: LayerCapacity, at: AtDimension) -> Iterator[dict[str, Any]]:
    gated, printed = _GATED if layer.sizes.is_gated else "", at.published
    ratio = log10_count(printed.dense) - at.dense_leading
    yield _row("regions_dense", "document", printed.dense, "Phi(k N, d): exact, general position")
    far = f"m^d / d! of m = k N neurons; Phi(m, d) is 10^{ratio:+.4f} times as many"
    yield _row("regions_dense_leading", "document", None, far, log10=at.dense_leading)
    yield _row("regions_top_1", "document", printed.top_1, _claim(at, printed.top_1, is_of_k=False))
    yield _row("regions_top_k", "document", printed.top_k, _claim(at, printed.top_k))
    normalised = "experts of width N / k"
    yield _row("regions_normalised", "document", printed.normalised, normalised)
    notes = [gated]
    if at.regions is None:
        notes.append("not computed: too many chosen experts for the sum")
    elif at.regions_leading is not None:
        apart = log10_count(at.regions) - at.regions_leading
        notes.append(f"10^{apart:+.4f} times its leading term in N")
    yield _row("regions", "upper_bound", at.regions, "; ".join(filter(None, notes)))
    most = log10_count(at.zonotope_vertices) - log10_count(printed.dense)
    beside = f"2 Phi(k N - 1, d); 10^{most:+.4f} times Phi(k N, d)"
    yield _row("zonotope_vertices", "exact", at.zonotope_vertices, beside)


def _claim(at: AtDimension, count: int, is_of_k: bool = True) -> str:
    """Whether a published count of k experts can be attained."""
    if not is_of_k or at.regions is None or count <= at.regions:
        return ""
    more = log10_count(count) - log10_count(at.regions)
    return f"published as attained up to a constant; at least 10^{more:.4f} times what is possible"


def _splits(layer: LayerCapacity) -> Iterator[dict[str, Any]]:
    thumb = "per-expert rule of thumb; the bound itself needs k N >= d"
    for gain in layer.splits[0].gains if layer.splits else ():
        yield _row("largest_split", "document", gain.largest_split, thumb, data_dim=gain.dims)
    for split in layer.splits:
        yield from _split(split)


def _split(split: SplitExperts) -> Iterator[dict[str, Any]]:
    sizes = f"{split.num_experts} experts of {split.width}, top-{split.top_k}"
    yield _gain("gain_of_sets", "exact", split.sets, sizes, split=split.split)
    spurious = "its factor g^-d is spurious: k N does not change"
    for gain in split.gains:
        where = {"split": split.split, "data_dim": gain.dims}
        yield _gain("gain_as_published", "document", gain.published, spurious, **where)
        yield _gain("gain_of_cells", "upper_bound", gain.cells, "ratio of two bounds", **where)
        yield _gain("gain_of_regions", "upper_bound", gain.regions, "ratio of two bounds", **where)


def _costs(layer: LayerCapacity) -> Iterator[dict[str, Any]]:
    one_matrix = "one matrix per expert, no router"
    for name, counts in vars(layer.published_parameters).items():
        for which, count in vars(counts).items():
            yield _row(f"parameters_{which}_{name}", "document", count, one_matrix)
    for which, count in vars(layer.parameters).items():
        yield _row(f"parameters_{which}", "exact", count, "experts, shared experts, router")
    macs = "FLOP: twice as many"
    yield _row("macs_experts", "exact", layer.expert_macs, macs)
    for name, count in vars(layer.macs).items():
        yield _row(f"macs_{name}_router", "exact", count, macs)
    for name, count in vars(layer.published_macs).items():
        end = "" if name == "experts" else "_router"
        yield _row(f"macs_{name}{end}_as_published", "document", count, "called FLOP there")
