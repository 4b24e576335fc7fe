"""How wide the experts beside a router are: by config and headers; no byte of one is read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.router.expert_samples import expert_leaves, folder_of
from moegeom.router.family import SOME, Setting
from moegeom.router.plain_names import plain_name
from moegeom.router.settings import Settings

#: Keys of a config that hold the width of one expert, those of experts alone first.
_KEYS = (
    "moe_intermediate_size",
    "expert_feed_forward_length",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "expert_intermediate_size",
    "moe_inter_dim",
    "ffn_hidden_size",
    "intermediate_size",
    "feed_forward_length",
)

#: Tables of a config in which they stand.
_ROOTS = (
    "",
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config.text_config",
    "ffn_config",
)

#: Numbers beside packed weights, and what is packed: their shapes are not those of the matrix.
_NO_MATRIX = re.compile(
    r"scale|zero|bias|blocks|packed|absmax|g_idx|lora|quant_map|qweight|router|norm"
)

#: Formats that hold a number in each element.
_PLAIN = re.compile(r"(F|BF|I8|F8_)\w*", re.IGNORECASE)

#: Experts that run for every token, which need not stand beside the others.
_SHARED = re.compile(r"shared_(?:experts?|mlp)\.|_shexp\.")

_LAYER = re.compile(r".*?(?:layers|blk|blocks|h)\.[0-9]+\.")


@dataclass(frozen=True)
class ExpertShape:
    """Neurons of one expert, and of all shared experts together; ``origin`` says by what.

    ``is_gated`` is None where no tensor shows it.
    """

    width: int
    is_gated: bool | None
    shared_width: int
    origin: str


def expert_shape(
    store: TensorStore,
    router: Router,
    by_folder: Mapping[str, Sequence[str]],
    option: int | None = None,
) -> ExpertShape:
    """The width of the experts of a router: ``option``, or that of the config, as shapes confirm.

    ``store`` and ``by_folder`` have plain names (``experts_by_folder``).

    Raises
    ------
    RouterError
        Where config and shapes contradict each other, or neither says it.
    """
    matrices = dict(_matrices(store, router, by_folder))
    others = sorted({other for other in matrices.values() if other > 0})
    key, width = ("--width", option) if option is not None else _in_config(store.config, router)
    if width is None and not others:
        raise RouterError(
            f"{store.label}: neither the config nor a tensor says how wide the experts of router "
            f"{router.name} are.",
            "Say it: --width N.",
        )
    if width is None:
        width, origin = others[0], f"shape of {_first(matrices)}"
    elif not others:
        origin = f"{key}; no tensor of an expert to check it by"
    else:
        origin = f"{key}, as {_first(matrices)} has it"
    if others and (others[0] != width or set(others) - {width, 2 * width}):
        raise RouterError(
            f"{store.label}: {key} says experts of {width:,} neurons, and {_first(matrices)} has "
            f"{others[0]:,} beside inputs of {router.hidden_size:,}.",
            "One of them is of another model; --width N takes the place of the config.",
        )
    is_fused = 2 * width in others
    is_gated = None if not matrices else is_fused or len(matrices) >= 3
    return ExpertShape(width, is_gated, _shared(store, router), origin)


def open_headers(
    store: TensorStore, routers: Iterable[Router], by_folder: Mapping[str, Sequence[str]]
) -> None:
    """What ``expert_shape`` of these routers reads, at the same time where that saves waiting."""
    names = [
        name
        for router in routers
        for name in (*_named_experts(router, by_folder)[0], *_shared_names(store, router))
    ]
    # of files that are not there nothing is known
    with contextlib.suppress(CheckpointError):
        store.prepare(names)


def _first(matrices: Mapping[str, int]) -> str:
    return min(matrices, key=lambda name: (matrices[name], name))


def _in_config(config: Mapping[str, Any], router: Router) -> tuple[str, int | None]:
    settings = Settings(config, _ROOTS).at(router.layer)
    for key in _KEYS:
        if settings.has(setting := Setting((key,), range=SOME)):
            return f"config.json: '{key}'", settings.integer(setting)
    return "", None


def _matrices(
    store: TensorStore, router: Router, by_folder: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int]]:
    """Matrices of one expert, each with the size of the side that is not that of the inputs."""
    folder = folder_of(router)
    names, is_stacked = _named_experts(router, by_folder)
    for name in names or _of_layer(store, router):
        if not _NO_MATRIX.search(name.removeprefix(folder)):
            other = _other_side(store, name, router.hidden_size, router.num_experts, is_stacked)
            if other:
                yield name, other


def _named_experts(
    router: Router, by_folder: Mapping[str, Sequence[str]]
) -> tuple[Sequence[str], bool]:
    """Tensors of the first expert; or those of all experts, and True."""
    folder = folder_of(router)
    names = by_folder.get(folder, ())
    one = [those[min(those)] for those in expert_leaves(folder, names).values()]
    return (one, False) if one else (names, True)


def _of_layer(store: TensorStore, router: Router) -> list[str]:
    """All tensors of the layer: experts may be one tensor under a name of its own."""
    layer = _LAYER.match(plain_name(router.provenance.tensors[0]))
    if layer is None:
        return []
    return sorted(name for name in store.names() if name.startswith(layer[0]))


def _other_side(
    store: TensorStore, name: str, hidden: int, experts: int, is_stacked: bool
) -> int | None:
    """None for what is no matrix of the inputs, and for headers that are not there."""
    try:
        info = store.info(name)
    except CheckpointError:
        return None
    shape = info.shape
    if not _PLAIN.fullmatch(info.dtype):
        return None
    if is_stacked and len(shape) == 2 and hidden in shape and "experts." in name:
        other = shape[1] if shape[0] == hidden else shape[0]  # one below the other
        return other // experts if other % experts == 0 else None
    if is_stacked:
        if len(shape) != 3 or shape[0] != experts:
            return None
        shape = shape[1:]
    if len(shape) != 2 or hidden not in shape:
        return None
    return shape[0] if shape[1] == hidden else shape[1]


def _shared(store: TensorStore, router: Router) -> int:
    """Neurons of all shared experts of the layer together; 0 where there are none."""
    others = (
        _other_side(store, name, router.hidden_size, 0, is_stacked=False)
        for name in _shared_names(store, router)
    )
    return min((other for other in others if other), default=0)


def _shared_names(store: TensorStore, router: Router) -> list[str]:
    return [
        name
        for name in _of_layer(store, router)
        if _SHARED.search(name) and not _NO_MATRIX.search(name)
    ]
