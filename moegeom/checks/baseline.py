"""The file that a checkpoint is compared with: a few figures per layer, made to be committed.

It holds the columns of ``layers`` with their standard errors, and for each row of a router its
length and 32 seeded projections. No weights can be had back from it, and no tokens are in it.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, to_builtins

from moegeom.core.documents import DocumentError, parse_json, record_of
from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.files import read_regular, write_whole
from moegeom.core.limits import MOST_JSON
from moegeom.core.metric import NUM_PROJECTIONS
from moegeom.core.router import RouterName
from moegeom.core.shapes import Float32
from moegeom.core.text import quoted
from moegeom.results.reader import ResultsView

#: Version of the file; a reader refuses others.
BASELINE_VERSION = 1

#: A projection of a row is stored in units of its length times 2^-12: 16 bits reach to 8 lengths,
#: and 32 Gaussian projections of a unit vector stay below 8 but once in 10^13.
_STEPS = 4096.0

#: Numbers of each expert that not every router has, by the column of ``experts`` they come from.
_VECTORS = {
    "selection_bias": "selection_bias",
    "logit_bias": "logit_bias",
    "load": "load",
    "load_error": "load_se",
}


#: What is not negative.
_LENGTHS = ("norms", "load", "load_error")


class _Facts(Struct, omit_defaults=True):
    num_experts: int
    hidden_size: int
    top_k: int
    stored_dtype: str
    rule: str = ""  # baselines of older versions lack it


_Figure = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Error = Annotated[float, Meta(ge=0.0, lt=1e100)]


class _Router(Struct):
    facts: _Facts
    columns: dict[str, tuple[_Figure, _Error | None]]
    digests: dict[str, str]
    norms: bytes
    projections: bytes
    mean_projections: bytes
    samples: list[str] | None = None
    selection_bias: bytes | None = None
    logit_bias: bytes | None = None
    load: bytes | None = None
    load_error: bytes | None = None
    modules: dict[str, str] | None = None  # baselines of older versions lack it


class _File(Struct):
    """A baseline as it is written: arrays are bytes, projections steps of the length of a row."""

    moegeom: str
    checkpoint: dict[str, str]
    num_tokens: int
    versions: dict[str, str]
    routers: dict[str, _Router]
    dense_elsewhere: frozenset[RouterName] | None = None
    tables: dict[RouterName, str] = {}  # baselines of older versions lack it


@dataclass(frozen=True, eq=False)
class BaselineRouter:
    """One router: figures as (value, standard error or None), and arrays by expert.

    ``norms`` and ``projections`` belong to the centred effective rows; ``digests`` tell whether
    weight, gain and bias are bit for bit the same. ``facts`` hold the rule in words, but for
    baselines of older versions; these lack ``modules`` too, those of the block behind it, with the
    numbers of its experts.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, tuple[float, float | None]]
    digests: Mapping[str, str]
    norms: Float32[np.ndarray, "experts"]
    projections: Float32[np.ndarray, "experts projections"]
    mean_projections: Float32[np.ndarray, "projections"]
    selection_bias: Float32[np.ndarray, "experts"] | None = None
    logit_bias: Float32[np.ndarray, "experts"] | None = None
    load: Float32[np.ndarray, "experts"] | None = None
    load_error: Float32[np.ndarray, "experts"] | None = None
    samples: Sequence[str] | None = None
    modules: Mapping[str, str] | None = None

    @property
    def half_step(self) -> Float32[np.ndarray, "experts"]:
        """How far a projection of each row may be from what it was before it was written."""
        return (self.norms / np.float32(2.0 * _STEPS)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Baseline:
    """A checkpoint as it was when the baseline was made.

    ``dense_elsewhere`` names routers in layers that some engines take as dense; None in a baseline
    of an older version. ``tables`` are digests of the tables by token id, of each router.
    """

    moegeom: str
    checkpoint: Mapping[str, Any]
    num_tokens: int
    versions: Mapping[str, str]
    routers: Mapping[str, BaselineRouter] = field(default_factory=dict)
    dense_elsewhere: frozenset[str] | None = None
    tables: Mapping[str, str] = field(default_factory=dict)

    def changed_versions(self, run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` whose meaning differs between the baseline and a run."""
        now = run.get("column_versions", {})
        return [c for c in columns if c in self.versions and self.versions[c] != now.get(c)]


def baseline_of(results: ResultsView) -> Baseline:
    """The baseline that results give.

    Raises
    ------
    UsageError
        When the results lack what a baseline needs.
    """
    run = results.run
    experts: dict[str, list[Mapping[str, Any]]] = {}
    for row in results.rows("experts"):
        if (row["variant"], row["population"]) == ("as_stored", "all"):
            experts.setdefault(row["router"], []).append(row)
    facts = {entry["name"]: entry for entry in run["routers"]}
    modules, routers = modules_of(run), {}
    for row in results.rows("layers"):
        if (row["variant"], row["population"]) == ("as_stored", "all"):
            name = row["router"]
            routers[name] = _router_of(row, experts[name], facts[name], modules.get(name, {}))
    return Baseline(
        moegeom=run["moegeom"],
        checkpoint={key: run["checkpoint"][key] for key in ("name", "family", "rule")},
        num_tokens=max((row["num_tokens"] or 0 for row in results.rows("layers")), default=0)
        if run["tokens"]
        else 0,
        versions=run["column_versions"],
        routers=routers,
        dense_elsewhere=frozenset(one["router"] for one in run.get("dense_elsewhere", ())),
        tables=tables_of(run),
    )


def tables_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the tables by token id that could be read, by router."""
    tables = run.get("token_tables", ())
    return {one["router"]: one["digest"] for one in tables if one.get("digest")}


def modules_of(run: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """The modules of the block behind each router that has any."""
    parts = run.get("blocks", {}).get("parts", ())
    return {router: one["modules"] for one in parts for router in one["routers"]}


def _router_of(
    row: Mapping[str, Any],
    experts: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    modules: Mapping[str, str],
) -> BaselineRouter:
    if any(e.get("row_projections") is None for e in experts):
        raise UsageError(
            f"router {row['router']}: the results hold no projections of its rows, or rows that "
            "are not finite.",
            "A baseline is made from a checkpoint that passes its integrity checks.",
        )
    columns = {
        name: (float(value), row.get(f"{name}_se"))
        for name, value in row.items()
        if isinstance(value, int | float) and not name.endswith("_se") and math.isfinite(value)
    }

    def vector(name: str) -> Float32[np.ndarray, "experts"] | None:
        values = [e.get(name) for e in experts]
        with np.errstate(over="ignore"):
            return None if None in values else np.array(values, dtype=np.float32)

    samples = [e.get("expert_sample") for e in experts]
    with np.errstate(over="ignore"):
        projections = np.array([e["row_projections"] for e in experts], dtype=np.float32)
    mean = np.array(row["mean_row_projections"], dtype=np.float32)
    norms = vector("centred_row_norm")
    if norms is None:
        raise UsageError("the results hold no lengths of rows: they are of an older moegeom.")
    if not all(np.isfinite(values).all() for values in (projections, mean, norms)):
        raise UsageError(
            f"router {row['router']}: its rows are too large for a baseline.",
            "A baseline is made from a checkpoint that can be trusted.",
        )
    return BaselineRouter(
        facts={n: facts[n] for n in _Facts.__struct_fields__ if facts.get(n) is not None},
        columns=columns,
        digests={n: v for n, v in row.items() if n.endswith("_digest") and v is not None},
        norms=norms,
        projections=projections,
        mean_projections=mean,
        samples=None if None in samples else [str(sample) for sample in samples],
        modules=modules,
        selection_bias=vector(_VECTORS["selection_bias"]),
        logit_bias=vector(_VECTORS["logit_bias"]),
        load=vector(_VECTORS["load"]),
        load_error=vector(_VECTORS["load_error"]),
    )


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes the file; keys are sorted, so that two baselines can be compared line by line."""
    document = {
        "moegeom_baseline": BASELINE_VERSION,
        "moegeom": baseline.moegeom,
        "checkpoint": baseline.checkpoint,
        "num_tokens": baseline.num_tokens,
        "dense_elsewhere": sorted(baseline.dense_elsewhere or ()),
        "tables": dict(baseline.tables),
        "versions": baseline.versions,
        "routers": {name: _to_json(router) for name, router in baseline.routers.items()},
    }
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_whole(path, text)


def read_baseline(path: str | Path) -> Baseline:
    """The baseline in a file that nobody vouches for.

    Raises
    ------
    ResultsError
        When the file cannot be read, or is no baseline of this version.
    """
    file = Path(path)
    try:
        document = parse_json(read_regular(file, MOST_JSON, follows=True))
    except FileNotFoundError:
        raise ResultsError(
            f"{file}: there is no such baseline.",
            f"`moegeom check CKPT --update-baseline --baseline {file}` writes it.",
        ) from None
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise ResultsError(
            f"{file}: no baseline can be read from it ({reason}).",
            "`moegeom check CKPT --update-baseline --baseline FILE` writes one.",
        ) from error
    version = document.get("moegeom_baseline") if isinstance(document, dict) else None
    if version is None:
        raise ResultsError(
            f"{file}: no baseline of moegeom; expected an object with the key 'moegeom_baseline'.",
            "`moegeom check CKPT --update-baseline --baseline FILE` writes one.",
        )
    if version != BASELINE_VERSION:
        raise ResultsError(
            f"{file}: baseline version {str(version)[:20]!r}; this moegeom reads "
            f"{BASELINE_VERSION}.",
            "Write it again with --update-baseline.",
        )
    try:
        whole = record_of(_File, document)
        routers = {name: _from_file(name, one) for name, one in whole.routers.items()}
    except ValueError as error:
        raise ResultsError(
            f"{file}: is damaged: {error}.",
            "Take it from version control again, or write it with --update-baseline.",
        ) from error
    return Baseline(
        *(whole.moegeom, whole.checkpoint, whole.num_tokens, whole.versions, routers),
        whole.dense_elsewhere,
        {str(name): digest for name, digest in whole.tables.items()},
    )


def _to_json(router: BaselineRouter) -> dict[str, Any]:
    scale = np.where(router.norms > 0.0, router.norms, 1.0)[:, None]
    steps = np.clip(np.rint(router.projections / scale * _STEPS), -32767, 32767)
    vectors = ("norms", "mean_projections", *_VECTORS)
    columns = {
        name: [_rounded(value), None if error is None else _rounded(error)]
        for name, (value, error) in router.columns.items()
    }
    return {
        "facts": dict(router.facts),
        "columns": columns,
        "digests": dict(router.digests),
        "samples": router.samples,
        "modules": None if router.modules is None else dict(router.modules),
        "projections": _text(steps, np.int16),
        **{name: _text(getattr(router, name), np.float32) for name in vectors},
    }


def _from_file(name: str, entry: _Router) -> BaselineRouter:
    """The router; ValueError where arrays are not of its size, or hold what they cannot."""
    RouterName.parsed(name)
    experts, where = entry.facts.num_experts, f"of {quoted(name, 40)}"

    def numbers(key: str, raw: bytes, length: int, kind: type[np.number[Any]]) -> np.ndarray:
        little = np.dtype(kind).newbyteorder("<")
        if len(raw) != length * little.itemsize:
            raise ValueError(f"{key} {where} has {len(raw)} bytes, not those of {length} numbers")
        values = np.frombuffer(raw, little).astype(kind)
        if not np.isfinite(values).all() or (key in _LENGTHS and (values < 0.0).any()):
            raise ValueError(f"{key} {where} holds a number that is not finite, or below 0")
        return values

    if entry.samples is not None and len(entry.samples) != experts:
        raise ValueError(f"samples {where} are {len(entry.samples)} of {experts} experts")
    norms = numbers("norms", entry.norms, experts, np.float32)
    steps = numbers("projections", entry.projections, experts * NUM_PROJECTIONS, np.int16)
    mean = numbers("mean_projections", entry.mean_projections, NUM_PROJECTIONS, np.float32)
    of_some = {key: raw for key in _VECTORS if (raw := getattr(entry, key)) is not None}
    scale = np.where(norms > 0.0, norms, 1.0)[:, None] / _STEPS
    return BaselineRouter(
        facts=to_builtins(entry.facts),
        columns=entry.columns,
        digests=entry.digests,
        norms=norms,
        projections=(steps.reshape(experts, NUM_PROJECTIONS) * scale).astype(np.float32),
        mean_projections=mean,
        samples=entry.samples,
        modules=entry.modules,
        **{key: numbers(key, raw, experts, np.float32) for key, raw in of_some.items()},
    )


def _rounded(value: float) -> float:
    """Seven significant figures: more would only make the file longer."""
    return float(f"{value:.7g}")


def _text(values: np.ndarray | None, dtype: type[np.generic]) -> str | None:
    if values is None:
        return None
    little = np.dtype(dtype).newbyteorder("<")
    return base64.b64encode(values.astype(little).tobytes()).decode("ascii")
