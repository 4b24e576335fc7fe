"""The file that a checkpoint is compared with: a few figures per layer, made to be committed.

It holds the columns of ``layers`` with their standard errors, and for each row of a router its
length and 32 seeded projections. No weights can be had back from it, and no tokens are in it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.files import read_regular, write_whole
from moegeom.core.limits import MOST_JSON
from moegeom.core.metric import NUM_PROJECTIONS
from moegeom.core.router import ROUTER_NAME
from moegeom.core.text import quoted
from moegeom.results.reader import ResultsView

#: Version of the file; a reader refuses others.
BASELINE_VERSION = 1

#: A projection of a row is stored in units of its length times 2^-12: 16 bits reach to 8 lengths,
#: and 32 Gaussian projections of a unit vector stay below 8 but once in 10^13.
_STEPS = 4096.0

_FACTS = ("num_experts", "hidden_size", "top_k", "stored_dtype")

#: Facts that baselines of older versions lack.
_LATER_FACTS = ("rule",)

#: Numbers of each expert that not every router has, by the column of ``experts`` they come from.
_VECTORS = {
    "selection_bias": "selection_bias",
    "logit_bias": "logit_bias",
    "load": "load",
    "load_error": "load_se",
}


@dataclass(frozen=True, eq=False)
class BaselineRouter:
    """One router: figures as (value, standard error or None), and arrays by expert.

    ``norms`` and ``projections`` belong to the centred effective rows; ``digests`` tell whether
    weight, gain and bias are bit for bit the same. ``facts`` hold the rule in words, but for
    baselines of older versions.
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

    @property
    def half_step(self) -> Float32[np.ndarray, "experts"]:
        """How far a projection of each row may be from what it was before it was written."""
        return (self.norms / np.float32(2.0 * _STEPS)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Baseline:
    """A checkpoint as it was when the baseline was made.

    ``dense_elsewhere`` names routers in layers that some engines take as dense; None in a baseline
    of an older version.
    """

    moegeom: str
    checkpoint: Mapping[str, Any]
    num_tokens: int
    versions: Mapping[str, str]
    routers: Mapping[str, BaselineRouter] = field(default_factory=dict)
    dense_elsewhere: frozenset[str] | None = None

    def changed_versions(self, run: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` whose meaning differs between the baseline and a run."""
        now = run.get("column_versions", {})
        return [c for c in columns if c in self.versions and self.versions[c] != now.get(c)]


def baseline_of(results: ResultsView) -> Baseline:
    """The baseline that results give.

    Raises
    ------
    UsageError
        When the results lack what a baseline needs, or come from a synthetic prior.
    """
    run = results.run
    if run["tokens"] and run["tokens"]["is_synthetic"]:
        raise UsageError(
            "a baseline of a synthetic prior would be compared with real tokens.",
            "Make it from a recording, or without tokens.",
        )
    experts: dict[str, list[Mapping[str, Any]]] = {}
    for row in results.rows("experts"):
        if (row["variant"], row["population"]) == ("as_stored", "all"):
            experts.setdefault(row["router"], []).append(row)
    facts = {entry["name"]: entry for entry in run["routers"]}
    routers = {}
    for row in results.rows("layers"):
        if (row["variant"], row["population"]) == ("as_stored", "all"):
            name = row["router"]
            routers[name] = _router_of(row, experts[name], facts[name])
    return Baseline(
        moegeom=run["moegeom"],
        checkpoint={key: run["checkpoint"][key] for key in ("name", "family", "rule")},
        num_tokens=max((row["num_tokens"] or 0 for row in results.rows("layers")), default=0)
        if run["tokens"]
        else 0,
        versions=run["column_versions"],
        routers=routers,
        dense_elsewhere=frozenset(one["router"] for one in run.get("dense_elsewhere", ())),
    )


def _router_of(
    row: Mapping[str, Any], experts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
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
    norms = _required(vector("centred_row_norm"))
    if not all(np.isfinite(values).all() for values in (projections, mean, norms)):
        raise UsageError(
            f"router {row['router']}: its rows are too large for a baseline.",
            "A baseline is made from a checkpoint that can be trusted.",
        )
    return BaselineRouter(
        facts={n: facts[n] for n in (*_FACTS, *_LATER_FACTS) if facts.get(n) is not None},
        columns=columns,
        digests={n: v for n, v in row.items() if n.endswith("_digest") and v is not None},
        norms=norms,
        projections=projections,
        mean_projections=mean,
        samples=None if None in samples else [str(sample) for sample in samples],
        **{name: vector(column) for name, column in _VECTORS.items()},
    )


def _required(values: Float32[np.ndarray, "experts"] | None) -> Float32[np.ndarray, "experts"]:
    if values is None:
        raise UsageError("the results hold no lengths of rows: they are of an older moegeom.")
    return values


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes the file; keys are sorted, so that two baselines can be compared line by line."""
    document = {
        "moegeom_baseline": BASELINE_VERSION,
        "moegeom": baseline.moegeom,
        "checkpoint": baseline.checkpoint,
        "num_tokens": baseline.num_tokens,
        "dense_elsewhere": sorted(baseline.dense_elsewhere or ()),
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
        routers = {_named(name): _from_json(entry) for name, entry in document["routers"].items()}
        dense = document.get("dense_elsewhere")
        return Baseline(
            moegeom=str(document["moegeom"]),
            checkpoint=dict(document["checkpoint"]),
            num_tokens=int(document["num_tokens"]),
            versions={str(k): str(v) for k, v in document["versions"].items()},
            routers=routers,
            dense_elsewhere=None if dense is None else frozenset(map(_named, dense)),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ResultsError(
            f"{file}: is damaged ({type(error).__name__}: {str(error)[:80]}).",
            "Take it from version control again, or write it with --update-baseline.",
        ) from error


def _named(name: str) -> str:
    if not ROUTER_NAME.fullmatch(name):
        raise ValueError(f"{quoted(name, 40)} is no router's name")
    return name


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
        "projections": _text(steps, np.int16),
        **{name: _text(getattr(router, name), np.float32) for name in vectors},
    }


def _from_json(entry: Mapping[str, Any]) -> BaselineRouter:
    facts = {name: entry["facts"][name] for name in _FACTS}
    facts |= {name: str(entry["facts"][name]) for name in _LATER_FACTS if name in entry["facts"]}
    experts = int(facts["num_experts"])
    norms = _array(entry["norms"], np.float32, experts)
    steps = _array(entry["projections"], np.int16, experts * NUM_PROJECTIONS)
    scale = np.where(norms > 0.0, norms, 1.0)[:, None] / _STEPS
    samples = entry.get("samples")
    if samples is not None and len(samples) != experts:
        raise ValueError(f"{len(samples)} samples for {experts} experts")

    vectors = {
        name: None if entry.get(name) is None else _array(entry[name], np.float32, experts)
        for name in _VECTORS
    }
    for values in (norms, vectors["load"], vectors["load_error"]):
        if values is not None and (values < 0.0).any():
            raise ValueError("a length, load or error is negative")
    return BaselineRouter(
        facts=facts,
        columns={str(name): _figure(name, *pair) for name, pair in entry["columns"].items()},
        digests={str(k): str(v) for k, v in entry["digests"].items()},
        norms=norms,
        projections=(steps.reshape(experts, NUM_PROJECTIONS) * scale).astype(np.float32),
        mean_projections=_array(entry["mean_projections"], np.float32, NUM_PROJECTIONS),
        samples=None if samples is None else [str(sample) for sample in samples],
        **vectors,
    )


def _figure(name: str, value: Any, error: Any) -> tuple[float, float | None]:
    """A value and its standard error; ValueError unless they can be what they claim to be."""
    for number in (value, error):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise ValueError(f"{name} is {str(number)[:20]!r}, no number")
    figure = float(value), None if error is None else float(error)
    if not math.isfinite(figure[0]) or (figure[1] is not None and not 0.0 <= figure[1] < 1e100):
        raise ValueError(f"{name} is {figure[0]:g} with standard error {figure[1]}")
    return figure


def _rounded(value: float) -> float:
    """Seven significant figures: more would only make the file longer."""
    return float(f"{value:.7g}")


def _text(values: np.ndarray | None, dtype: type[np.generic]) -> str | None:
    if values is None:
        return None
    little = np.dtype(dtype).newbyteorder("<")
    return base64.b64encode(values.astype(little).tobytes()).decode("ascii")


def _array(text: str, dtype: type[np.generic], length: int) -> np.ndarray:
    raw = base64.b64decode(text, validate=True)
    values = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    if len(values) != length:
        raise ValueError(f"{len(values)} numbers where {length} belong")
    if not np.isfinite(values).all():
        raise ValueError("a number is not finite")
    return values
