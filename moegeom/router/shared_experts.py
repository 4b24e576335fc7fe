"""The shared experts of a layer as a function of the router input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float32
from moegeom.geometry.experts import Neurons, affine, expert_output, is_known, logistic
from moegeom.router.expert_tensors import (
    experts_settings,
    experts_spec,
    layer_of,
    neurons_of,
    read_module,
)
from moegeom.router.plain_names import with_plain_names

#: Modules of one layer behind its name: of shared experts, and of the number they are gated by.
_MODULE = re.compile(
    r"(?:.*\.)?(?:shared?_(?:experts?|mlp)\.(?P<leaf>[a-z0-9_]+)|ffn_(?P<gguf>gate|up|down)_shexp)"
)
_GATE = re.compile(r"(?:.*\.)?(?:shared_expert_gate|ffn_gate_inp_shexp)")

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
    gates = [name for name in store.names() if _is_gate(name, start)]
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
        gate=gates[0].removesuffix(".weight") if gates else "",
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


def _is_gate(name: str, start: str) -> bool:
    stem = name.removeprefix(start).removesuffix(".weight")
    return name.startswith(start) and bool(_GATE.fullmatch(stem))
