"""The tensors of one router's module, asked for by the names they have beside a ``weight``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import RouterError
from moegeom.core.shapes import Shaped
from moegeom.router.integrity import STORAGE_UNKNOWN
from moegeom.router.settings import Settings

Values = Mapping[str, Shaped[np.ndarray, "..."]]
Read = Callable[[str], Shaped[np.ndarray, "..."]]

#: Scales and zero points of activations: they change what a layer computes, not its weight.
_OF_ACTIVATIONS = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"}
)

#: Dtypes of a scale that is no power of two by definition.
FLOATS = PLAIN_FLOATS

#: Dtypes of a power of two that is stored as its exponent alone.
EXPONENTS = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True)
class RouterTensors:
    """Tensors by the part of their name behind the module's path.

    A *part* is that name for a router whose plain weight is called ``weight``; ``leaf`` is what
    this one's is called. ``read`` reads a small tensor on which a shape depends.
    """

    infos: Mapping[str, TensorInfo]
    settings: Settings
    router: str
    leaf: str
    read: Read | None

    def key(self, part: str) -> str:
        """What a part is called here."""
        if part.startswith("weight"):
            return self.leaf + part.removeprefix("weight")
        stem = self.leaf.rpartition(".")[0]
        return f"{stem}.{part}" if stem else part

    def name(self, part: str) -> str:
        """The whole name that a part has or would have."""
        key, info = next(iter(self.infos.items()))
        return info.name.removesuffix(key) + self.key(part)

    def dtype(self, part: str) -> str:
        """Stored dtype of a part; empty when there is no such tensor."""
        info = self.infos.get(self.key(part))
        return info.dtype if info else ""

    def take(
        self,
        storage: str,
        needed: Mapping[str, Collection[str]],
        optional: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, TensorInfo]:
        """The parts of a scheme, each with the dtypes that it may have.

        Raises
        ------
        RouterError
            If one is missing, has another dtype, or another tensor stands beside them.
        """
        allowed = {**needed, **(optional or {})}
        present = (self.infos.get(self.key(part)) for part in needed)
        first = next(info for info in present if info)
        for part in needed:
            if self.key(part) not in self.infos:
                raise refuse(first, f"is stored as {storage} without '{self.name(part)}'.")
        ignored = {self.key(part) for part in _OF_ACTIVATIONS}
        unknown = self.infos.keys() - {self.key(part) for part in allowed} - ignored
        if unknown:
            raise stands_beside(self.infos[min(unknown)], first)
        parts = {p: self.infos[self.key(p)] for p in allowed if self.key(p) in self.infos}
        for part, info in parts.items():
            if info.dtype not in allowed[part]:
                expected = " or ".join(sorted(allowed[part]))
                raise refuse(info, f"of {storage} is stored as {info.dtype}, expected {expected}.")
        return parts

    def by_part(self, values: Values, parts: Collection[str]) -> Values:
        """Values by the names that the schemes use."""
        return {part: values[self.key(part)] for part in parts}


def refuse(info: TensorInfo, why: str, hint: str = "") -> RouterError:
    """The error for storage that is not understood; ``why`` continues its sentence."""
    return RouterError(
        f"{info.file}: tensor '{info.name}' {why}",
        hint or "Use the original weights of this router.",
        code=STORAGE_UNKNOWN,
    )


_IF_A_BIAS = (
    "If it is a bias, say which: --router-pattern with --selection-bias or --logit-bias, or a "
    "--family FILE that names it."
)


def stands_beside(unknown: TensorInfo, weight: TensorInfo) -> RouterError:
    """The error for a tensor that nobody knows: it may change what the weight means."""
    return refuse(
        unknown,
        f"stands beside the router weight '{weight.name}' ({weight.dtype}), "
        "and what it means is not known.",
        _IF_A_BIAS
        if unknown.name.endswith("bias")
        else "It may be a scale of quantised storage; use the original weights.",
    )


def expect_shape(info: TensorInfo, *expected: tuple[int, ...]) -> None:
    """Raise unless the tensor has one of the shapes."""
    if info.shape not in expected:
        listed = " or ".join(map(str, dict.fromkeys(expected)))
        raise refuse(info, f"has shape {info.shape}, expected {listed}.")


def matrix_shape(info: TensorInfo) -> tuple[int, int]:
    """Rows and columns of a tensor that must be a matrix with elements."""
    if len(info.shape) != 2 or 0 in info.shape:
        raise refuse(info, f"has shape {info.shape}, expected a matrix (quantised weights are).")
    return info.shape[0], info.shape[1]
