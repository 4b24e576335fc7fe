"""What a run was made of: the contents of ``run.json`` and the plan that a resume must match."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from moegeom import __version__ as moegeom_version
from moegeom.core.digest import digest_of, identities_of
from moegeom.core.errors import RecordingError, RouterError
from moegeom.core.extras import is_installed
from moegeom.core.files import reading
from moegeom.core.metric import Metric
from moegeom.core.router import EXPERT_SCALE, Router, RouterSet
from moegeom.core.row_keys import ALL, AS_STORED, CHECKPOINT_B, RANDOM, RUN_B, under_random
from moegeom.core.shapes import Float
from moegeom.core.text import listed
from moegeom.core.tokens import TILE, SourceFacts
from moegeom.engine.checkpoint_b import CheckpointB
from moegeom.engine.request import ScanRequest, Tokens, typed_tokens
from moegeom.engine.trust import Trust
from moegeom.geometry.rows import drawn_run, law_of, law_together
from moegeom.results.plans import any_flipped
from moegeom.router.facts import drawn_row_facts
from moegeom.router.rule import rule_in_words, rule_origin
from moegeom.tokens.files import TokenFiles, paths_of
from moegeom.tokens.memory import HeldArrays
from moegeom.tokens.traces.alignment import RunB
from moegeom.variants.emulated import arithmetic
from moegeom.variants.what_if import parse_what_ifs

#: Libraries whose version can change a bit of the results; a check of weights need not have them.
_LIBRARIES = ("numpy", "scipy", "numba", "pyarrow")


def files_identity(tokens: str | TokenFiles) -> list[list[Any]]:
    """What tells each file from another one that took its place: a resume, and results that are
    there already, are of these files and no others.
    """
    files: list[Path] = []
    for path in (paths := paths_of(tokens)):
        with reading(path, RecordingError):
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
            files += [file for file in inside if file.is_file()]
    with reading(paths[0], RecordingError):
        identities = identities_of(files)
    return [[file.name, *identity] for file, identity in zip(files, identities, strict=True)]


def arithmetic_facts(backend: str) -> dict[str, Any]:
    """How logits are computed, and by which libraries on which core."""
    libraries = blas_libraries()
    return {
        "backend": backend,
        "product": "float32 inputs and weights, float32 accumulation (float64 if stored so)",
        "tile_tokens": TILE,
        "blas": _all_of(libraries, "internal_api"),
        "blas_version": _all_of(libraries, "version"),
        "blas_core": _all_of(libraries, "architecture"),
    }


def blas_libraries() -> list[dict[str, Any]]:
    """The libraries of linear algebra that NumPy and SciPy compute with, whatever else is loaded.

    Where the two bring none of their own, all that are loaded. Without SciPy those of NumPy.
    """
    users = [np]
    if is_installed("scipy"):
        import scipy.linalg  # which brings the second one, if nothing did before

        users.append(scipy)
    loaded = [lib for lib in threadpool_info() if lib["user_api"] == "blas"]
    beside = [Path(module.__file__ or "").parents[1] for module in users]
    own = [
        lib
        for lib in loaded
        if any(Path(lib["filepath"]).is_relative_to(folder / name)
               for folder in beside for name in ("numpy", "numpy.libs", "scipy", "scipy.libs"))
    ]  # fmt: skip
    return own or loaded


def _all_of(libraries: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """What the libraries say, sorted, each once: the order in which they are found is no fact."""
    return ", ".join(sorted({str(lib[key]) for lib in libraries if lib.get(key)})) or None


def run_facts(
    routers: RouterSet, measured: Sequence[Router], source: SourceFacts | None, trust: Trust | None
) -> dict[str, Any]:
    """Everything about the inputs that a reader of the results needs; no paths, no token text."""
    return {
        "moegeom": moegeom_version,
        "libraries": {name: version(name) for name in _LIBRARIES if is_installed(name)},
        "python": platform.python_version(),
        "checkpoint": {
            "name": routers.checkpoint,
            "family": routers.family,
            "rule": routers.family_text,
            "fingerprint": routers.fingerprint,
            "bytes_read": routers.bytes_read,
            "bytes_total": routers.bytes_total,
            "seconds": routers.seconds,
            "num_routers": len(routers.routers),
            "num_expected": routers.num_expected,
            "notes": list(routers.notes),
            "layer_notes": list(routers.layer_notes),
            "skipped": [dataclasses.asdict(skipped) for skipped in routers.skipped],
            "rule_origin": rule_origin(routers.family),
            "revision": routers.revision,
        },
        "routers": [router_facts(router) for router in measured],
        "tokens": None if source is None else dataclasses.asdict(source),
        "trust": None if trust is None else dataclasses.asdict(trust),
    }


def router_facts(router: Router) -> dict[str, Any]:
    """Shape, rule and origin of one router."""
    groups = router.rule.groups
    return {
        "name": router.name,
        "num_experts": router.num_experts,
        "hidden_size": router.hidden_size,
        "top_k": router.rule.top_k,
        "is_affine": router.rule.is_affine,
        "is_linear": router.rule.is_linear,
        "pick": router.rule.pick,
        "selection_score_unit": router.rule.selection_score_unit,
        "stored_dtype": router.provenance.stored_dtype,
        "bias_tensor": router.provenance.bias_tensor,
        "bias_dtype": router.provenance.bias_dtype,
        "score": router.rule.score,
        "rule": rule_in_words(router),
        "weights_from": router.rule.weights.source,
        "is_weight_one": router.shared_rows is None and router.rule.is_weight_one,
        "has_logit_bias": router.rule.has_logit_bias,
        "has_selection_bias": router.rule.has_selection_bias,
        "num_groups": 1 if groups is None else groups.num_groups,
        "num_kept_groups": 1 if groups is None else groups.num_kept,
        "group_fill": None if groups is None else str(groups.fill),
        "parts": {n: _state(n, part) for n, part in router.other_parts.items()},
        "tensors": list(router.provenance.tensors),
        "file": router.provenance.file,
        "num_non_finite_rows": len(router.non_finite_rows),
    }


def _state(name: str, part: np.ndarray) -> str:
    """What is odd about the numbers of a part: not finite, 0 or 1 everywhere, or 0 for an expert;
    empty for others.

    Another number everywhere may be one for all experts.
    """
    if not np.isfinite(part).all():
        return "not finite"
    first = part.flat[0] if part.size else 0.0
    if part.size > 1 and first in (0.0, 1.0) and (part == first).all():
        return f"{abs(first):g} everywhere"
    # a scale of 0 switches its expert off; a gate is one row
    zeros = np.flatnonzero(part == 0.0).tolist() if name == EXPERT_SCALE else []
    return f"0 for expert {listed(zeros, 4)}" if zeros else ""


def column_versions(metrics: Sequence[Metric]) -> dict[str, str]:
    """``metric/version`` of each column of ``layers``: figures of different versions differ."""
    return {
        column.name: f"{metric.name}/{metric.version}"
        for metric in metrics
        for column in metric.columns.get("layers", ())
    }


def refused_facts(refusal: RouterError) -> dict[str, Any]:
    """Facts of a checkpoint whose routers could not be read, and why."""
    return {
        "moegeom": moegeom_version,
        "checkpoint": {"name": refusal.checkpoint},
        "routers": [],
        "tokens": None,
        "trust": None,
        "refused": {"code": refusal.code, "message": refusal.message, "hint": refusal.hint},
    }


def plan_facts(
    request: ScanRequest,
    routers: RouterSet,
    source: SourceFacts | None,
    device: str,
    columns: Mapping[str, str],
    checkpoint_b: CheckpointB | None = None,
) -> dict[str, Any]:
    """All that decides results, which is the key of what is kept: a run goes on where another
    stopped, and answers for it, where this is equal.

    ``device`` is the kind that computes: a product of another one may differ in the last bit.
    ``columns`` are the versions of what is measured, :func:`column_versions`.
    """
    options = _options(request)
    if checkpoint_b is not None:
        options["checkpoint_b"] = {
            "fingerprint": checkpoint_b.checkpoint.fingerprint,
            "family": checkpoint_b.checkpoint.family,
            "rules": [repr(router.rule) for router in checkpoint_b.routers.values()],
        }
    return {
        "moegeom": moegeom_version,
        "libraries": {name: version(name) for name in _LIBRARIES if is_installed(name)},
        "checkpoint": routers.fingerprint,
        "rules": {router.name: repr(router.rule) for router in routers.routers},
        "routers": {router.name: router_identity(router) for router in routers.routers},
        "tokens": None if source is None else dataclasses.asdict(source),
        "token_files": token_identity(request.tokens),
        "columns": digest_of(json.dumps(dict(columns), sort_keys=True)),
        "options": options | {"device": device},
    }


def _options(request: ScanRequest) -> dict[str, Any]:
    """What was asked, with the files of it as what tells each from others."""
    options = {
        field.name: plain(getattr(request, field.name))
        for field in dataclasses.fields(request)
        if "outside_plan" not in field.metadata
    }
    for name in ("run_b", "expert_map", "expert_map_b"):
        if options[name] is not None:
            options[name] = files_identity(options[name])
    return options


def asked_facts(request: ScanRequest, fingerprint: str) -> dict[str, Any]:
    """What of a plan is known before the tokens are read."""
    return {
        "moegeom": moegeom_version,
        "checkpoint": fingerprint,
        "checkpoint_b": request.checkpoint_b,
        "family": plain(request.requested_family),
        "token_files": token_identity(request.tokens),
        "options": _options(request),
    }


def token_identity(tokens: Tokens | None) -> list[Any]:
    """What tells other tokens from these, beside their facts: files, or arrays in memory."""
    if isinstance(tokens, HeldArrays):
        return [tokens.digest]
    return files_identity(tokens) if isinstance(tokens, str | TokenFiles) else []


def router_identity(router: Router) -> str:
    """A hash of everything that is known of a router but its rule and where it was found."""
    names = (field.name for field in dataclasses.fields(router))
    return digest_of({n: getattr(router, n) for n in names if n not in ("rule", "provenance")})


def plain(value: Any) -> Any:
    """An option as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def run_b_facts(run_b: RunB) -> dict[str, Any]:
    """Where the choices of the other run come from, and how they were matched."""
    facts = run_b.source.facts
    return {
        "name": facts.name,
        "engine": facts.engine,
        "stage": facts.stage,
        "num_tokens": facts.num_tokens,
        "num_matched": int((run_b.token >= 0).sum()),
        "notes": [*facts.notes, *run_b.notes],
        "fits": [dataclasses.asdict(fit) for fit in run_b.fits],
    }


def checkpoint_b_facts(checkpoint_b: CheckpointB) -> dict[str, Any]:
    """What the second checkpoint is, and what its routers had to be made into."""
    router_set = checkpoint_b.checkpoint
    return {
        "name": router_set.checkpoint,
        "family": router_set.family,
        "rule": router_set.family_text,
        "has_same_rule": checkpoint_b.has_same_rule,
        "fingerprint": router_set.fingerprint,
        "revision": router_set.revision,
        "num_routers": len(router_set.routers),
        "num_compared": len(checkpoint_b.routers),
        "equal": list(checkpoint_b.equal),
        "regained": list(checkpoint_b.regained),
        "unknown_gain": list(checkpoint_b.unknown_gain),
    }


def explain_command(request: ScanRequest) -> str:
    """What to type to learn why two runs choose differently; empty where none was named."""
    tokens = typed_tokens(request.tokens)
    if request.run_b is None or not tokens:
        return ""
    typed = [request.checkpoint, *tokens, "--run-b", request.run_b]
    typed += [] if request.checkpoint_b is None else ["--checkpoint-b", request.checkpoint_b]
    of_b = (
        ("--stage-b", request.stage_b),
        ("--dialect-b", request.dialect_b),
        ("--expert-map-b", request.expert_map_b),
    )
    for option, value in of_b:
        typed += [] if value is None else [option, value]
    for key, router in request.map_b.items():
        typed += ["--map-b", f"{key}={router}"]
    return f"{shlex.join(['moegeom', 'explain', *typed])} {request.typed_again()}".rstrip()


#: What variants are that every scan has.
_VARIANTS = {
    AS_STORED: "the routers as the checkpoint stores them",
    RANDOM: "rows replaced by random directions of the same length; rule and biases kept",
}


def variant_rows(
    layers: Sequence[Mapping[str, Any]],
    request: ScanRequest,
    run_b: Mapping[str, Any] | None,
    checkpoint_b: Mapping[str, Any] | None,
    folders: Sequence[Path],
) -> list[dict[str, Any]]:
    """A row for each variant that was measured: what it is, the tokens it was measured on, and how
    many it flips at one layer at least.

    ``folders`` are those with the bitmaps of the routers.
    """
    described: dict[str, dict[str, Any]] = {
        name: {"text": text} for name, text in _VARIANTS.items()
    }
    if run_b is not None:
        text = f"choices of another run: {run_b['name']}"
        described[RUN_B] = {"text": text, "engine": run_b["engine"]}
    if checkpoint_b is not None:
        text = f"routers of another checkpoint on the same inputs: {checkpoint_b['name']}"
        described[CHECKPOINT_B] = {"text": text}
    for what_if in parse_what_ifs(request.what_ifs):
        described[what_if.name] = {"text": f"what-if: {what_if.name}"}
    for name in request.arithmetics:
        how = arithmetic(name)
        facts = {key: getattr(how, key) for key in ("text", "engine", "version", "source", "ties")}
        described |= dict.fromkeys((name, under_random(name)), facts)
    tokens = {row["variant"]: row["num_tokens"] for row in layers if row["population"] == ALL}
    rows = []
    for name, num_tokens in tokens.items():
        row = {**described.get(name, {}), "variant": name, "seed": request.seed}
        if joined := any_flipped(folders, name):
            row["num_flipped_any_layer"], row["num_tokens_all_layers"] = joined
        rows.append(row | {"num_tokens": num_tokens})
    return rows


def initialised_facts(routers: RouterSet, measured: Sequence[Router]) -> dict[str, Any]:
    """Moments of the weights of each router and the law of its numbers, if they have one; beside
    what the config drew them with, where it says that, and groups of rows that are as drawn. Rows
    behind a projection are no drawn numbers, and are left out.
    """
    plain = [router for router in measured if router.projection is None]
    rows = [
        {"router": router.name, **moments, "law": law_of(router.weight)}
        for router in plain
        if (moments := _moments(router.weight))
    ]
    weights = {router.name: router.weight for router in plain}
    small = [
        row
        for row in rows
        if row["law"] is None
        and row["num_weights"] >= _LEAST_OF_LAW
        and len(weights[row["router"]]) >= _LEAST_ROWS_OF_LAW
    ]
    together = law_together([weights[row["router"]] for row in small])
    for row in small:
        row["law"] = together
    sigma = routers.initializer_range
    groups = [] if sigma is None else drawn_row_facts(measured, sigma)
    others = {row["router"] for row in rows if row["law"] == ""} - {one["router"] for one in groups}
    for name in filter(others.__contains__, weights):
        if run := drawn_run(weights[name]):
            law, some = run
            of = {"router": name, "num_rows": len(weights[name])}
            groups.append({**of, "rows": list(some), "law": law})
    facts = {} if sigma is None else {"initializer_range": sigma}
    return {**facts, "routers": rows, **({"groups": groups} if facts or groups else {})}


#: Numbers and rows of a router that say something of the law that all of them have.
_LEAST_OF_LAW, _LEAST_ROWS_OF_LAW = 512, 4


def _moments(weight: Float[np.ndarray, "experts hidden"]) -> dict[str, float]:
    """Number, mean, standard deviation and excess kurtosis; empty where they are not defined."""
    if not weight.size:
        return {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        values = weight.astype(np.float64).ravel()
        mean = float(values.mean())
        values -= mean
        values *= values
        variance = float(values.mean())
        kurtosis = float(values @ values / values.size / np.float64(variance) ** 2) - 3.0
        std = math.sqrt(variance)
    if not np.isfinite([mean, std, kurtosis]).all():
        return {}
    return {"num_weights": values.size, "mean": mean, "std": std, "kurtosis": kurtosis}
