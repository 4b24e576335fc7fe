"""``research outputs``: what do experts give on recorded tokens?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError, RouterError, UsageError
from moegeom.core.files import refuse_existing
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float32, Float64, Int32, Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenColumns, TokenSource
from moegeom.engine.plan import by_tile
from moegeom.engine.sample import Sample
from moegeom.engine.search_pace import SearchPace
from moegeom.engine.session import Session
from moegeom.geometry.experts import (
    adding_up,
    centred_by_expert,
    mean_pair_cosine,
    tokens_by_expert,
)
from moegeom.geometry.space import energy_share, mean_energy_share, mean_energy_share_error
from moegeom.pipeline import Watch
from moegeom.research.outputs import STUDY
from moegeom.research.outputs.record import ExpertOutput, Outputs, OutputsRequest, RouterOutputs
from moegeom.router.expert_functions import (
    ExpertFunctions,
    SharedExperts,
    open_expert_functions,
    open_shared_experts,
)
from moegeom.studies.announced import announce_bytes
from moegeom.studies.study import each
from moegeom.studies.written import refuse_out, write_rows
from moegeom.tokens.recording.writer import RecordingWriter


# --------------------------------------------------------------------------------------- one router
@dataclass(frozen=True, eq=False)
class LayerExperts:
    """The experts beside a router; ``no_shared`` says why shared experts are not computed."""

    functions: ExpertFunctions
    shared: SharedExperts | None
    no_shared: str

    def bytes_of(self, experts: set[int] | None) -> int:
        """Bytes of these experts (all for None) and of the shared ones."""
        shared = 0 if self.shared is None else self.shared.num_bytes
        return self.functions.bytes_of(experts) + shared

    def products(self, chosen: Int32[np.ndarray, "tokens k"]) -> float:
        """Those of routed experts on the tokens that chose them, with what reading them takes."""
        numbers = self.functions.tensors.num_values
        return float(numbers) * (chosen.size + _READING * len(used_experts(chosen)))


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """Outputs of one layer; ``every`` are those of each expert, None unless asked for."""

    routed: Float32[np.ndarray, "tokens hidden"]
    shared: Float32[np.ndarray, "tokens hidden"] | None
    every: Float32[np.ndarray, "tokens experts hidden"] | None


def layer_outputs(
    router: Router, layer: LayerExperts, tokens: Sample, every_expert: bool, pace: SearchPace
) -> tuple[RouterOutputs, LayerOutputs]:
    """What the experts of a layer give on the tokens; each expert is read once."""
    inputs, chosen = tokens.inputs, tokens.chosen
    slots = np.zeros((*chosen.shape, router.hidden_size), np.float32)
    contributions = np.zeros_like(slots)
    every = None
    if every_expert:
        every = np.empty((len(inputs), router.num_experts, router.hidden_size), np.float32)
    work = [*_work(router, chosen, every_expert)]
    for expert, token, slot in pace.parts(work, lambda _: 1):
        if every is not None:
            every[:, expert] = layer.functions.apply(expert, inputs)
        if len(token):
            own = inputs[token]
            of_own = layer.functions.apply(expert, own) if every is None else every[token, expert]
            weights = tokens.weights[token, slot]
            slots[token, slot] = of_own
            contributions[token, slot] = layer.functions.contribution(expert, own, weights, of_own)
    routed = contributions.sum(axis=1, dtype=np.float64)
    shared = None
    if layer.shared is not None:
        shared = layer.shared.apply(inputs)
    elif layer.no_shared == "none":
        shared = np.zeros_like(inputs)
    overlap = mean_pair_cosine(slots)
    figures = RouterOutputs(
        router=router.name,
        num_experts=router.num_experts,
        top_k=chosen.shape[1],
        num_tokens=len(inputs),
        num_read=router.num_experts if every_expert else len(np.unique(chosen[chosen >= 0])),
        num_bytes=layer.bytes_of(None if every_expert else used_experts(chosen)),
        input_norm=_mean_norm(inputs),
        routed_norm=_mean_norm(routed),
        routed_mean_share=mean_energy_share(routed),
        shared=layer.no_shared or "computed",
        **_of_shared(routed, shared if layer.shared is not None else None),
        overlap=_mean(overlap),
        overlap_centred=_mean(mean_pair_cosine(centred_by_expert(slots, chosen))),
        **_of_every(every),
        adds_up=_mean(adding_up(contributions)),
        errors=(mean_energy_share_error(routed), _error(overlap)),
        experts=tuple(_experts(router, tokens, slots, contributions)),
    )
    return figures, LayerOutputs(routed.astype(np.float32), shared, every)


def used_experts(chosen: Int32[np.ndarray, "tokens k"]) -> set[int]:
    """The experts that some token chose."""
    return {expert for expert in np.unique(chosen).tolist() if expert >= 0}


def _work(
    router: Router, chosen: Int32[np.ndarray, "tokens k"], every_expert: bool
) -> Iterator[tuple[int, Int64[np.ndarray, "some"], Int64[np.ndarray, "some"]]]:
    """The experts to compute, with the tokens and slots that chose each."""
    by_expert = {expert: (token, slot) for expert, token, slot in tokens_by_expert(chosen)}
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    for expert in range(router.num_experts) if every_expert else by_expert:
        yield (expert, *by_expert.get(expert, nothing))


def _of_shared(
    routed: Float64[np.ndarray, "tokens hidden"], shared: Float[np.ndarray, "tokens hidden"] | None
) -> dict[str, float | None]:
    names = ("norm", "mean_share", "energy_share")
    if shared is None:
        absent = ("routed_energy_share", "total_norm", "total_mean_share")
        return dict.fromkeys((*(f"shared_{n}" for n in names), *absent))
    part = shared.astype(np.float64)
    total = routed + part
    return {
        "shared_norm": _mean_norm(part),
        "shared_mean_share": mean_energy_share(part),
        "shared_energy_share": energy_share(part, total),
        "routed_energy_share": energy_share(routed, total),
        "total_norm": _mean_norm(total),
        "total_mean_share": mean_energy_share(total),
    }


def _of_every(
    every: Float32[np.ndarray, "tokens experts hidden"] | None,
) -> dict[str, float | None]:
    if every is None:
        return {"overlap_every": None, "overlap_every_centred": None}
    return {
        "overlap_every": _mean(mean_pair_cosine(every)),
        "overlap_every_centred": _mean(
            mean_pair_cosine(every - every.mean(axis=0, dtype=np.float64).astype(np.float32))
        ),
    }


def _experts(
    router: Router,
    tokens: Sample,
    outputs: Float32[np.ndarray, "tokens k hidden"],
    contributions: Float32[np.ndarray, "tokens k hidden"],
) -> Iterator[ExpertOutput]:
    lengths = np.linalg.norm(outputs.astype(np.float64), axis=2)
    added = np.linalg.norm(contributions.astype(np.float64), axis=2)
    energy = float((added**2).sum())
    for expert in range(router.num_experts):
        token, slot = np.nonzero(tokens.chosen == expert)
        by = added[token, slot]
        yield ExpertOutput(
            expert=expert,
            num_tokens=len(token),
            weight=float(tokens.weights[token, slot].mean()) if len(token) else None,
            output_norm=float(lengths[token, slot].mean()) if len(token) else None,
            contribution_norm=float(by.mean()) if len(token) else None,
            energy_share=float((by**2).sum()) / energy if energy else 0.0,
        )


def _mean_norm(values: Float[np.ndarray, "tokens width"]) -> float:
    return float(np.linalg.norm(values.astype(np.float64), axis=1).mean())


def _mean(values: Float64[np.ndarray, "tokens"]) -> float:
    """Mean over the tokens with a value; nan without any."""
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _error(values: Float64[np.ndarray, "tokens"]) -> float:
    """Of their mean over the tokens with a value; nan for fewer than two."""
    finite = values[~np.isnan(values)]
    return float(finite.std(ddof=1) / np.sqrt(len(finite))) if len(finite) > 1 else float("nan")


#: Tokens below which a mean says nothing; how many are drawn, and how few of wide experts.
_LEAST_TOKENS, _TOKENS, _FEW_TOKENS = 2, 512, 32

#: Products of a layer that are made before fewer tokens are taken, 5 seconds of one core, about;
#: reading one number of an expert takes as long as so many of them.
_PRODUCTS, _READING = 1.5e11, 70


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

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/deepseek-tiny"
    >>> found = mg.outputs(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=1, sample=64)
    >>> [router.shared for router in found.value.routers]
    ['computed']
    """
    if request.out is not None:
        _refuse_out(request.out, request.overwrite)
    if request.sample is not None and request.sample < _LEAST_TOKENS:
        raise UsageError(f"--sample {request.sample}: expected {_LEAST_TOKENS} or more.")
    opened, source = STUDY.open(request)
    layers, left_out = _layers(opened)
    routers = [router for router in opened.recorded if router.name in layers]
    sample = _sample(opened, routers, request.sample or _TOKENS)
    if request.sample is None and not request.every_expert:
        sample = _affordable(sample, layers, request.seed)
    _announce(routers, layers, sample, request, watch)
    reports, made = [], {}
    for router in each(routers, watch, max(r.num_experts for r in routers), is_paced=True):
        pace = SearchPace(watch, None, f"{router.name}: its experts")
        figures, arrays = layer_outputs(
            router, layers[router.name], sample[router.name], request.every_expert, pace
        )
        reports.append(figures)
        if _is_recording(request.out):
            made[router.name] = arrays
    kinds: tuple[str, ...] = ()
    if request.out is not None and _is_recording(request.out):
        kinds = _write_recording(request.out, opened, source, sample, made)
    elif request.out is not None:
        rows = ({"router": one.router} | asdict(e) for one in reports for e in one.experts)
        write_rows(request.out, rows, routers)
    return Outputs(
        run=opened.facts(routers),
        routers=tuple(reports),
        left_out=(*opened.left_out, *left_out),
        num_tokens=len(next(iter(sample.values())).token),
        sample=opened.sample_counts([*sample.values()]),
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
    experts, left_out, refusal = {}, [], None
    for router in opened.recorded:
        try:
            functions = open_expert_functions(opened.store, router)
        except RouterError as error:
            left_out.append((router.name, error.message))
            refusal = refusal or error
            continue
        shared, why = _shared(opened, router)
        experts[router.name] = LayerExperts(functions, shared, why)
    if refusal is not None and not experts:
        raise refusal
    return experts, left_out


def _shared(opened: Session, router: Router) -> tuple[SharedExperts | None, str]:
    try:
        shared = open_shared_experts(opened.store, router)
    except RouterError as error:
        return None, error.message
    return shared, "none" if shared is None else ""


# -------------------------------------------------------------------------------------- the sample
def _sample(opened: Session, routers: Sequence[Router], most: int) -> dict[str, Sample]:
    """The same tokens at every router, less those that are not finite at one of them."""
    names = ("input", "chosen", "weights")
    samples = {router.name: opened.sample(router, names, most) for router in routers}
    token = functools.reduce(np.intersect1d, (one.token for one in samples.values()))
    if len(token) < _LEAST_TOKENS:
        raise RecordingError(
            f"{opened.routers.checkpoint}: of a sample {number_of(len(token), 'token')} can be "
            f"used at every router; expected {_LEAST_TOKENS} or more."
        )
    return {name: one.at(token) for name, one in samples.items()}


def _affordable(
    sample: Mapping[str, Sample], layers: Mapping[str, LayerExperts], seed: int
) -> Mapping[str, Sample]:
    """The tokens, or a drawn half of them, a quarter and so on, until no layer takes too long."""
    few, order = sample, np.arange(len(next(iter(sample.values())).token))
    random = np.random.default_rng(seed).permutation(order)
    while len(order) > _FEW_TOKENS and any(
        layers[name].products(one.chosen) > _PRODUCTS for name, one in few.items()
    ):
        order = np.sort(random[: max(-(-len(order) // 2), _FEW_TOKENS)])
        few = {name: one.part(order) for name, one in sample.items()}
    return few


def _announce(
    routers: Sequence[Router],
    layers: Mapping[str, LayerExperts],
    sample: Mapping[str, Sample],
    request: OutputsRequest,
    watch: Watch | None,
) -> None:
    used = {r.name: used_experts(sample[r.name].chosen) for r in routers}
    read = sum(
        layers[r.name].bytes_of(None if request.every_expert else used[r.name]) for r in routers
    )
    announce_bytes(read, "of experts are", request.yes, watch)
    sizes = [
        4 * len(sample[r.name].token) * r.hidden_size * (2 + request.every_expert * r.num_experts)
        for r in routers
    ]
    in_memory = sum(sizes) if _is_recording(request.out) else max(sizes)
    announce_bytes(in_memory, "of outputs are", request.yes, None, "held in memory")


# ---------------------------------------------------------------------------------------- writing
def _write_recording(
    out: Path,
    opened: Session,
    source: TokenSource,
    sample: Mapping[str, Sample],
    made: Mapping[str, LayerOutputs],
) -> tuple[str, ...]:
    """One shard with inputs, recorded choices and outputs; the kinds that every router has."""
    facts, names = source.facts, tuple(made)
    token = next(iter(sample.values())).token
    outputs = {
        "shared_output": {name: layer.shared for name, layer in made.items()},
        "routed_output": {name: layer.routed for name, layer in made.items()},
        "expert_output": {name: layer.every for name, layer in made.items()},
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
        source.read_columns(start, int(token[rows[-1]]) + 1).at(token[rows] - start)
        for start, rows in by_tile(token)
    ]
    return parts[0].then(*parts[1:])


def _recorded_choice(
    source: TokenSource, router: str, token: Int64[np.ndarray, "tokens"]
) -> np.ndarray:
    parts = []
    for start, rows in by_tile(token):
        chosen = source.read_chosen(router, start, int(token[rows[-1]]) + 1)
        assert chosen is not None, "facts say that choices are recorded"
        parts.append(chosen[token[rows] - start])
    return np.concatenate(parts)
