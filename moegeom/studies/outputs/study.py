"""``moegeom outputs``: what do experts give on recorded tokens?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from threadpoolctl import threadpool_limits

from moegeom.core.errors import RecordingError, RouterError, UsageError
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenColumns, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.plan import sample_tiles
from moegeom.engine.prepared import prepare
from moegeom.engine.session import Session
from moegeom.engine.task import Task
from moegeom.kernels.reduction import Kernels
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import Watch
from moegeom.router.expert_functions import open_expert_functions
from moegeom.router.shared_experts import SharedExperts, open_shared_experts
from moegeom.studies.announced import announce_bytes
from moegeom.studies.outputs.record import Outputs, OutputsRequest, RouterOutputs
from moegeom.studies.outputs.router import (
    LayerExperts,
    LayerOutputs,
    LayerTokens,
    layer_outputs,
    used_experts,
)
from moegeom.studies.written import refuse_out, write_rows
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.stages import INPUT_STAGES

#: Tokens below which a mean says nothing.
_LEAST_TOKENS = 2


def outputs(request: OutputsRequest, watch: Watch | None = None) -> Outputs:
    """Outputs of routed and shared experts on a sample of the tokens, layer by layer.

    Raises
    ------
    RouterError
        When the checkpoint has no experts, or those of no layer can be computed.
    RecordingError
        When the recording does not hold router inputs, or records none of the routers.
    UsageError
        Without tokens, when more than 2 GB are to be read or held without ``yes``, and when
        ``out`` cannot be written.
    """
    if request.out is not None:
        _refuse_out(request.out, request.overwrite)
    if request.sample < _LEAST_TOKENS:
        raise UsageError(f"--sample {request.sample}: expected {_LEAST_TOKENS} or more.")
    opened = Session.open(request)
    source = opened.source
    if source is None:
        raise UsageError("experts are computed on recorded tokens.", "Add --tokens REC.")
    if source.facts.stage not in INPUT_STAGES:
        raise RecordingError(
            f"{source.facts.name}: holds {source.facts.stage.replace('_', ' ')}; experts are "
            "computed on router inputs.",
            "moegeom capture --keep hidden records them.",
        )
    layers, left_out = _layers(opened)
    routers = [router for router in opened.recorded if router.name in layers]
    wanted = _wanted(source.facts.num_tokens, request)
    sample = _sample(routers, source, load_kernels(request.backend), wanted)
    kept = next(iter(sample.values())).token
    _announce(routers, layers, sample, request, watch)
    if watch:
        watch.start(len(routers))
    found, made = [], {}
    for router in routers:
        if watch:
            watch.begin(router.name)
        figures, given = layer_outputs(
            router, layers[router.name], sample[router.name], request.every_expert
        )
        found.append(figures)
        if _is_recording(request.out):
            made[router.name] = given
        if watch:
            watch.advance(1)
    kinds: tuple[str, ...] = ()
    if request.out is not None and _is_recording(request.out):
        kinds = _write_recording(request.out, opened, source, sample, made)
    elif request.out is not None:
        _write_table(request.out, found)
    return Outputs(
        run=opened.facts(routers),
        routers=tuple(found),
        left_out=(*opened.left_out, *left_out),
        num_tokens=len(kept),
        num_dropped=len(wanted) - len(kept),
        every_expert=request.every_expert,
        seed=request.seed,
        kinds=kinds,
        written=None if request.out is None else str(request.out),
    )


# ---------------------------------------------------------------------------------------- what for
def _is_recording(out: Path | None) -> bool:
    return out is not None and not out.suffix


def _refuse_out(out: Path, overwrite: bool) -> None:
    if _is_recording(out):
        refuse_existing(out, hint="Name another folder for the recording.")
    else:
        refuse_out(out, overwrite, (".parquet",))


def _layers(opened: Session) -> tuple[dict[str, LayerExperts], list[tuple[str, str]]]:
    """The experts of each router whose experts can be computed, and why those of others cannot."""
    found, left_out, refusal = {}, [], None
    for router in opened.recorded:
        try:
            functions = open_expert_functions(opened.store, router)
        except RouterError as error:
            left_out.append((router.name, error.message))
            refusal = refusal or error
            continue
        shared, why = _shared(opened, router)
        found[router.name] = LayerExperts(functions, shared, why)
    if refusal is not None and not found:
        raise refusal
    return found, left_out


def _shared(opened: Session, router: Router) -> tuple[SharedExperts | None, str]:
    try:
        shared = open_shared_experts(opened.store, router)
    except RouterError as error:
        return None, error.message
    return shared, "none" if shared is None else ""


# -------------------------------------------------------------------------------------- the sample
def _wanted(total: int, request: OutputsRequest) -> Int64[np.ndarray, "tokens"]:
    """Numbers of the tokens of the sample, drawn from few tiles."""
    tiles = sample_tiles(total, request.seed)
    every = np.concatenate([np.arange(t * TILE, min((t + 1) * TILE, total)) for t in tiles])
    return np.sort(np.random.default_rng(request.seed).permutation(every)[: request.sample])


def _sample(
    routers: Sequence[Router],
    source: TokenSource,
    kernels: Kernels,
    wanted: Int64[np.ndarray, "tokens"],
) -> dict[str, LayerTokens]:
    """The tokens at every router, less those that are not finite at one of them."""
    with threadpool_limits(1, user_api="blas"):  # the arithmetic of the scan
        found = {
            router.name: _tokens_of(Task(prepare(router), source, kernels), wanted)
            for router in routers
        }
    kept = wanted
    for tokens in found.values():
        kept = np.intersect1d(kept, tokens.token)
    if len(kept) < _LEAST_TOKENS:
        raise RecordingError(
            f"{source.facts.name}: {number_of(len(kept), 'token')} of a sample of {len(wanted)} "
            f"are finite at every router; expected {_LEAST_TOKENS} or more."
        )
    return {name: tokens.at(kept) for name, tokens in found.items()}


def _tokens_of(task: Task, wanted: Int64[np.ndarray, "tokens"]) -> LayerTokens:
    parts = []
    total = task.source.facts.num_tokens
    for tile in np.unique(wanted // TILE).tolist():
        batch = LazyBatch(task, tile * TILE, min((tile + 1) * TILE, total))
        rows = np.flatnonzero(np.isin(batch.token, wanted))
        values = (batch.token, batch.input, batch.chosen, batch.weights)
        parts.append([value[rows] for value in values if value is not None])
    token, inputs, chosen, weights = map(np.concatenate, zip(*parts, strict=True))
    return LayerTokens(token, inputs.astype(np.float32, copy=False), chosen, weights)


def _announce(
    routers: Sequence[Router],
    layers: Mapping[str, LayerExperts],
    sample: Mapping[str, LayerTokens],
    request: OutputsRequest,
    watch: Watch | None,
) -> None:
    used = {r.name: used_experts(sample[r.name].chosen) for r in routers}
    read = sum(
        layers[r.name].bytes_of(None if request.every_expert else used[r.name]) for r in routers
    )
    announce_bytes(read, "of experts are", request.yes, watch)
    held = [
        4 * request.sample * r.hidden_size * (2 + request.every_expert * r.num_experts)
        for r in routers
    ]
    in_memory = sum(held) if _is_recording(request.out) else max(held)
    announce_bytes(in_memory, "of outputs are", request.yes, None, "held in memory")


# ---------------------------------------------------------------------------------------- writing
def _write_recording(
    out: Path,
    opened: Session,
    source: TokenSource,
    sample: Mapping[str, LayerTokens],
    made: Mapping[str, LayerOutputs],
) -> tuple[str, ...]:
    """One shard with inputs, recorded choices and outputs; the kinds that every router has."""
    facts, names = source.facts, tuple(made)
    token = next(iter(sample.values())).token
    outputs = {
        "shared_output": {name: given.shared for name, given in made.items()},
        "routed_output": {name: given.routed for name, given in made.items()},
        "expert_output": {name: given.every for name, given in made.items()},
    }
    whole = {
        kind: {name: rows for name, rows in by.items() if rows is not None}
        for kind, by in outputs.items()
        if all(rows is not None for rows in by.values())
    }
    chosen = None
    if facts.has_chosen:
        chosen = {name: _recorded_choice(source, name, token) for name in names}
    with RecordingWriter(
        out,
        "router_input",
        names,
        checkpoint_name=opened.routers.checkpoint,
        fingerprint=opened.routers.fingerprint,
        engine=facts.engine,
        domains=facts.domains,
        dtype="float32",
    ) as writer:
        writer.append(
            _columns(source, token),
            {name: sample[name].inputs for name in names},
            chosen,
            outputs=whole,
        )
    return tuple(whole)


def _columns(source: TokenSource, token: Int64[np.ndarray, "tokens"]) -> TokenColumns:
    parts = [
        source.read_columns(start, stop).at(rows) for start, stop, rows in _runs(source, token)
    ]
    return parts[0].then(*parts[1:])


def _recorded_choice(
    source: TokenSource, router: str, token: Int64[np.ndarray, "tokens"]
) -> np.ndarray:
    parts = []
    for start, stop, rows in _runs(source, token):
        found = source.read_chosen(router, start, stop)
        assert found is not None, "facts say that choices are recorded"
        parts.append(found[rows])
    return np.concatenate(parts)


def _runs(
    source: TokenSource, token: Int64[np.ndarray, "tokens"]
) -> list[tuple[int, int, Int64[np.ndarray, "rows"]]]:
    """Ranges of tokens to read, and the rows of each that are wanted."""
    total = source.facts.num_tokens
    found = []
    for tile in np.unique(token // TILE).tolist():
        start, stop = tile * TILE, min((tile + 1) * TILE, total)
        found.append((start, stop, token[(token >= start) & (token < stop)] - start))
    return found


def _write_table(out: Path, found: Sequence[RouterOutputs]) -> None:
    """A row for each expert of each router."""
    write_rows(out, [{"router": r.router} | asdict(one) for r in found for one in r.experts])
