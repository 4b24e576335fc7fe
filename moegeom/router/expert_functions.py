"""The experts of a layer, those behind its router and shared ones, as functions of its inputs."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float32, Float64, Integer
from moegeom.geometry.experts import (
    ACTIVATIONS,
    PRODUCTS,
    Neurons,
    affine,
    expert_output,
    is_known,
    logistic,
    mixed_output,
    over_rms,
)
from moegeom.router.expert_names import SHARED_GATE
from moegeom.router.expert_tensors import (
    ExpertTensors,
    ExpertWeights,
    experts_settings,
    experts_spec,
    has_shared_experts,
    layer_of,
    neurons_of,
    open_experts,
    read_beside,
    read_module,
)
from moegeom.router.family import ExpertsSpec, NormSpec
from moegeom.router.plain_names import with_plain_names
from moegeom.router.settings import Settings

# ---------------------------------------------------------------------------------- behind a router
#: Bytes of experts that are kept after they were used, and those of one that never is in memory.
_CACHE_BYTES, _WIDE_BYTES = 2**29, 2**26


@dataclass(frozen=True, eq=False)
class _Norm:
    """An RMS norm between the parts of a block."""

    gain: Float[np.ndarray, "width"]
    eps: float
    scales_first: bool = False

    def __call__(self, values: Float[np.ndarray, "tokens width"]) -> np.ndarray:
        gain = self.gain.astype(values.dtype, copy=False)
        return (
            over_rms(values * gain, self.eps)
            if self.scales_first
            else over_rms(values, self.eps) * gain
        )


@dataclass(frozen=True, eq=False)
class _Around:
    """What stands between the router input and the experts, and behind them; None for nothing."""

    scale: Float[np.ndarray, "hidden"] | None = None
    into: Float[np.ndarray, "latent hidden"] | None = None
    norm: _Norm | None = None
    output_norm: _Norm | None = None
    out_of: Float[np.ndarray, "hidden latent"] | None = None

    def read(self, inputs: np.ndarray) -> np.ndarray:
        """What the experts read."""
        states = inputs if self.scale is None else inputs * self.scale.astype(inputs.dtype)
        states = states if self.into is None else affine(states, self.into, None)
        return states if self.norm is None else self.norm(states)

    def given(self, outputs: np.ndarray) -> np.ndarray:
        """What comes of the output of an expert."""
        states = outputs if self.output_norm is None else self.output_norm(outputs)
        return states if self.out_of is None else affine(states, self.out_of, None)


@dataclass(frozen=True, eq=False)
class ExpertFunctions:
    """The experts of one router. Inputs are those that the router reads, behind its norm.

    Outputs have the dtype of the inputs, float32 or float64. The experts that were used last stay
    in memory, up to 512 MB of them; those above 64 MB are read in parts. Norms that stand behind
    the sum of the experts, and biases added to it, are no part of what experts give.
    """

    tensors: ExpertTensors
    router: Router
    factor: float
    _spec: ExpertsSpec
    _settings: Settings
    _cache: OrderedDict[int, ExpertWeights] = field(default_factory=OrderedDict, repr=False)

    @property
    def num_experts(self) -> int:
        """Experts that the router chooses among; the last ones may copy their input."""
        return self.router.num_experts

    def bytes_of(self, experts: Iterable[int] | None = None) -> int:
        """What is read for these experts, of all for None, each of them once."""
        numbers = range(self.num_experts) if experts is None else experts
        return self.tensors.bytes_of(e for e in numbers if e < self.tensors.num_experts)

    def apply(
        self, expert: int, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What an expert gives on each token, without routing weight.

        Raises
        ------
        RouterError
            Where stored values are not finite, or tensors around the experts are missing.
        """
        if self.tensors.num_experts <= expert < self.num_experts:
            return inputs
        states = self._around.read(inputs)
        if 4 * self.tensors.num_values > _WIDE_BYTES:
            return self._around.given(self.tensors.output(expert, states))
        one = self._weights(expert)
        return self._around.given(
            expert_output(
                states,
                one.gate,
                one.up,
                one.down,
                self.tensors.neurons,
                one.gate_bias,
                one.up_bias,
                one.down_bias,
            )
        )

    def contribution(
        self,
        expert: int,
        inputs: Float[np.ndarray, "tokens hidden"],
        weights: Float[np.ndarray, "tokens"],
        outputs: Float[np.ndarray, "tokens hidden"] | None = None,
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What an expert adds to the output of the block, with these routing weights; ``outputs``
        are those of :meth:`apply`, where they are there already. Raises as that.
        """
        by = weights.astype(inputs.dtype)[:, None]
        if self._spec.weighs_inputs:
            outputs = self.apply(expert, inputs * by)
        else:
            outputs = (self.apply(expert, inputs) if outputs is None else outputs) * by
        return outputs if self.factor == 1.0 else outputs * np.asarray(self.factor, outputs.dtype)

    def mixed(
        self,
        inputs: Float[np.ndarray, "tokens hidden"],
        chosen: Integer[np.ndarray, "tokens k"],
        weights: Float[np.ndarray, "tokens k"],
    ) -> Float64[np.ndarray, "tokens hidden"]:
        """The routed output of the block: the sum of the contributions of the chosen experts.

        Negative numbers are empty slots. Each expert is read at most once. Raises as :meth:`apply`.
        """
        return mixed_output(self.contribution, inputs, chosen, weights)

    def _weights(self, expert: int) -> ExpertWeights:
        cache = self._cache
        if expert in cache:
            cache.move_to_end(expert)
            return cache[expert]
        room = _CACHE_BYTES // (4 * self.tensors.num_values)
        while cache and len(cache) >= room:  # before there is one more
            cache.popitem(last=False)
        cache[expert] = self.tensors.read(expert)
        return cache[expert]

    @cached_property
    def _around(self) -> _Around:
        """Read when the first expert is."""
        spec, store, router = self._spec, self.tensors.store, self.router
        if spec.gain:
            return _Around(scale=self._gain_ratio())
        latent = spec.latent
        if latent is None or not self._settings.has(latent.width):
            return _Around()
        return _Around(
            into=read_beside(store, router, latent.into),
            norm=self._norm(latent.norm),
            output_norm=self._norm(latent.output_norm, latent.scales_before_output_norm),
            out_of=read_beside(store, router, latent.out_of),
        )

    def _gain_ratio(self) -> Float64[np.ndarray, "hidden"]:
        """From the router's norm of a state to the experts' norm of the same state."""
        own, router = read_beside(self.tensors.store, self.router, self._spec.gain), self.router
        if router.gain is None or (router.gain == 0.0).any():
            raise RouterError(
                f"router {router.name}: its own norm has gains of 0, from whose outputs the inputs "
                "of its experts do not follow."
            )
        return own.astype(np.float64) / router.gain

    def _norm(self, spec: NormSpec | None, scales_first: bool = False) -> _Norm | None:
        if spec is None:
            return None
        gain = read_beside(self.tensors.store, self.router, spec.weight)
        offset = self._settings.number(spec.gain_offset)
        eps = self._settings.number(spec.eps)
        return _Norm(gain + gain.dtype.type(offset), eps, scales_first)


@dataclass(frozen=True, eq=False)
class CountedExperts:
    """Experts as a mixture that remembers which of them it used."""

    functions: ExpertFunctions
    used: set[int] = field(default_factory=set)

    def mixed(
        self,
        inputs: Float[np.ndarray, "tokens hidden"],
        chosen: Integer[np.ndarray, "tokens k"],
        weights: Float[np.ndarray, "tokens k"],
    ) -> Float64[np.ndarray, "tokens hidden"]:
        """As :meth:`ExpertFunctions.mixed`."""
        self.used.update(np.unique(chosen[chosen >= 0]).tolist())
        return self.functions.mixed(inputs, chosen, weights)

    @property
    def facts(self) -> dict[str, int]:
        """How many experts were read, and how many bytes they have."""
        used = self.used
        return {"experts_read": len(used), "expert_bytes": self.functions.bytes_of(used)}


def open_expert_functions(store: TensorStore, router: Router) -> ExpertFunctions:
    """The experts beside a router, with what they do to its inputs; reads no values of theirs.

    Raises
    ------
    RouterError
        As :func:`~moegeom.router.expert_tensors.open_experts`, and where the activation is not
        known.
    """
    tensors = open_experts(store, router, of_router_inputs=False)
    spec, settings = experts_spec(router), experts_settings(store, router)
    how = tensors.neurons
    if not is_known(how, tensors.is_gated):
        names = ", ".join(sorted({*ACTIVATIONS, *PRODUCTS}))
        raise RouterError(
            f"{store.label}: the activation of the experts of router {router.name} is "
            f"{how.activation or 'not given'!r}; known are {names}."
        )
    factor = settings.number(spec.factor) * (1.0 - settings.number(spec.dropped))
    if has_shared_experts(store, router):
        factor *= settings.number(spec.factor_beside_shared)
    return ExpertFunctions(tensors, router, factor, spec, settings)


# ----------------------------------------------------------------------------------- shared experts
#: Modules of one layer behind its name: of shared experts, and of the number they are gated by.
_MODULE = re.compile(
    r"(?:.*\.)?(?:shared?_(?:experts?|mlp)\.(?P<leaf>[a-z0-9_]+)|ffn_(?P<gguf>gate|up|down)_shexp)"
)

#: Names of the first matrix or matrices (gate, up) and of the last.
_SPELLINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("linear_gate", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
    (("gate", "up"), "down"),
    (("up",), "down"),
)


@dataclass(frozen=True, eq=False)
class SharedExperts:
    """The experts that run for every token, before any byte of them is read.

    ``first`` and ``last`` are modules; ``gate`` is one whose sigmoid multiplies the output, empty
    where there is none.
    """

    store: TensorStore
    first: tuple[str, ...]
    last: str
    gate: str
    neurons: Neurons
    factor: float

    @property
    def num_bytes(self) -> int:
        """What is read."""
        stems = tuple(f"{stem}." for stem in (*self.first, self.last, self.gate) if stem)
        names = (name for name in self.store.names() if name.startswith(stems))
        return sum(self.store.info(name).size_bytes for name in names)

    def apply(
        self, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What they add to the output of the block, in the dtype of the inputs.

        Raises
        ------
        RouterError
            Where stored values are not finite, or matrices contradict each other.
        """
        gate, up, down = self._matrices
        outputs = expert_output(inputs, gate, up, down, self.neurons)
        if self.gate:
            outputs = outputs * logistic(affine(inputs, self._gate, None))
        return outputs if self.factor == 1.0 else outputs * np.asarray(self.factor, outputs.dtype)

    @cached_property
    def _matrices(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        gate, *rest = (read_module(self.store, stem) for stem in self.first)
        down = read_module(self.store, self.last)
        if not rest and len(gate) == 2 * down.shape[1]:
            gate, *rest = np.split(gate, 2)
        up = rest[0] if rest else None
        shapes = {matrix.shape for matrix in (gate, up, down.T) if matrix is not None}
        if len(shapes) > 1:
            raise RouterError(
                f"{self.store.label}: shapes beside '{self.last}' contradict each other: "
                f"{', '.join(map(str, sorted(shapes)))}."
            )
        if not is_known(self.neurons, up is not None):
            raise RouterError(
                f"{self.store.label}: the activation of '{self.last}' is "
                f"{self.neurons.activation or 'not given'!r}, which is not known."
            )
        return gate, up, down

    @cached_property
    def _gate(self) -> Float32[np.ndarray, "one hidden"]:
        return np.atleast_2d(read_module(self.store, self.gate))


def open_shared_experts(store: TensorStore, router: Router) -> SharedExperts | None:
    """The shared experts beside a router by names and config; None where a layer has none.

    Raises
    ------
    RouterError
        Where they are there and stored in a way that is not known, or weighted by the router.
    """
    store = with_plain_names(store)
    modules = _modules(store, router)
    if not modules:
        return None
    if router.shared_rows is not None:
        raise RouterError(
            f"{store.label}: the shared experts of router {router.name} are weighted by the router."
        )
    for first, last in _SPELLINGS:
        if {*first, last} <= modules.keys():
            return _opened(store, router, modules, first, last)
    raise RouterError(
        f"{store.label}: the shared experts beside router {router.name} are stored in a way that "
        f"is not known: {', '.join(sorted(modules))}."
    )


def _opened(
    store: TensorStore,
    router: Router,
    modules: Mapping[str, str],
    first: tuple[str, ...],
    last: str,
) -> SharedExperts:
    spec, settings = experts_spec(router), experts_settings(store, router)
    how = neurons_of(spec, settings)
    if spec.shared_limit is not None:
        how = replace(how, limit=settings.bound(spec.shared_limit))
    start, _ = layer_of(router)
    stems = {n: n.removesuffix(".weight") for n in store.names() if n.startswith(start)}
    gates = [stem for stem in stems.values() if SHARED_GATE.fullmatch(stem.removeprefix(start))]
    names = set(store.names())
    stems = [modules[leaf] for leaf in (*first, last)]
    if biased := [stem for stem in stems if f"{stem}.bias" in names]:
        raise RouterError(
            f"{store.label}: '{biased[0]}' of the shared experts beside router {router.name} has a "
            "bias, which is not known."
        )
    return SharedExperts(
        store=store,
        first=tuple(stems[:-1]),
        last=stems[-1],
        gate=gates[0] if gates else "",
        neurons=how,
        factor=settings.number(spec.factor_beside_shared),
    )


def _modules(store: TensorStore, router: Router) -> dict[str, str]:
    """Modules of the shared experts of the layer, by the last part of their name."""
    start, _ = layer_of(router)
    modules = {}
    for name in sorted(store.names()):
        stem = name.rpartition(".")[0]
        match = _MODULE.fullmatch(stem.removeprefix(start)) if name.startswith(start) else None
        if match:
            modules.setdefault(match["leaf"] or match["gguf"], stem)
        elif name.startswith(start) and (shared := _UNKNOWN.search(name.removeprefix(start))):
            modules.setdefault(shared[0], name)
    return modules


#: Anything else of shared experts; the number they are gated by is none.
_UNKNOWN = re.compile(r"shared?_(?:experts?\.|mlp\.|w\d).*")
