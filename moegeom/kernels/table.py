"""The list of kernels: one name, one stated tolerance, the same for every backend."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moegeom.core.registry import unknown_name


@dataclass(frozen=True)
class Kernel:
    """A hot loop. ``rtol`` is the largest relative difference from the reference; 0 means equal.

    It is None where the compiled kernel is the only one, for every backend of the processor: a
    reference would be its translation, so that tests hold it against definitions instead.

    Every kernel has the backends of the processor. ``on_device`` are those that the fused kernel of
    a device does (:mod:`moegeom.kernels.cuda.route`) and that ``cuda.parts`` has by themselves; the
    rest is done on the processor with what a device gives.

    One of the modules of a backend defines a function of that name.
    """

    name: str
    rtol: float | None
    summary: str
    on_device: bool = False


#: Sums are done in another order or precision than in the reference where rtol is not 0.
KERNELS: tuple[Kernel, ...] = (
    Kernel("input_norm", 1e-5, "length of each router input; not finite if the input is", True),
    Kernel(
        "rounded_inputs", None, "inputs less their last bits, their lengths and how far they moved"
    ),
    Kernel("wide_logits", None, "products with some of the rows, summed in float64"),
    Kernel("selection_scores", 1e-14, "what experts are compared by, for curved rules", True),
    Kernel("group_mask", 0.0, "selection scores, dropped groups filled, and group margin", True),
    Kernel("top_k", 0.0, "chosen experts, descending, ties to the lowest; margin", True),
    Kernel("boundary_distance", 1e-14, "exact distance to an affine cell's boundary; pair", True),
    Kernel("distance_bracket", 1e-14, "bounds of that distance from the largest logits; pair"),
    Kernel("curved_distance", None, "certified bounds of the distance for other rules; pair"),
    Kernel("routing_weights", 1e-13, "weight of each chosen expert"),
    Kernel("expert_set_key", 0.0, "64-bit key of the chosen set, whatever its order"),
    Kernel("same_set", 0.0, "is the recorded set the chosen set"),
    Kernel("score_statistics", 2e-5, "scores as probabilities, their entropy, log-sum-exp"),
    Kernel("add_scores", 0.0, "sums of probabilities by population, block and expert", True),
    Kernel("rounding_sigmas", 1e-10, "nearest boundary in standard deviations of input rounding"),
    Kernel("boundary_angle", 1e-14, "angle to the nearest boundary, before the norm in front"),
    Kernel("num_shared", 0.0, "number of experts that two choices have in common"),
    Kernel("count_pairs", 0.0, "tokens by block and pair of experts", True),
    Kernel("count_experts", 0.0, "chosen slots by population, block and expert", True),
    Kernel("count_bins", 0.0, "histogram over a value's bits by population and block", True),
)

#: Backends of the processor: each gives all kernels.
BACKENDS = ("reference", "cpu")

_MODULES = {
    "reference": ("reference",),
    "cpu": ("cpu.choice", "cpu.entering", "cpu.distance", "cpu.curved_distance", "cpu.counts"),
    "cuda": ("cuda.parts",),
}


def load_kernels(backend: str) -> MappingProxyType[str, Callable[..., Any]]:
    """All kernels of one backend of the processor by name.

    Imports Numba for ``cpu``; for ``reference`` only when a kernel without a reference is called.
    """
    if backend not in BACKENDS:
        raise unknown_name("kernel backend", backend, BACKENDS)
    return _kernels_of(backend, KERNELS)


def device_kernels() -> MappingProxyType[str, Callable[..., Any]]:
    """The kernels that a device has, by name; imports no CuPy."""
    return _kernels_of("cuda", [kernel for kernel in KERNELS if kernel.on_device])


def _kernels_of(
    backend: str, kernels: Iterable[Kernel]
) -> MappingProxyType[str, Callable[..., Any]]:
    return MappingProxyType(
        {
            kernel.name: functools.partial(_compiled, kernel.name)
            if backend == "reference" and kernel.rtol is None
            else _function(backend, kernel.name)
            for kernel in kernels
        }
    )


def _function(backend: str, name: str) -> Callable[..., Any]:
    modules = (importlib.import_module(f"moegeom.kernels.{part}") for part in _MODULES[backend])
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _compiled(name: str, *arguments: Any, **named: Any) -> Any:
    return _function("cpu", name)(*arguments, **named)
