"""What headers and a few bytes say of the experts beside routers: widths, first rows, hashes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError, RouterError
from moegeom.core.router import Router
from moegeom.router.expert_names import SHARED, LayerNames, layer_names, parted
from moegeom.router.expert_tensors import CONFIG_ROOTS, layer_of, open_experts
from moegeom.router.family import SOME, Setting
from moegeom.router.plain_names import with_plain_names
from moegeom.router.settings import Settings

# ------------------------------------------------------------------------------------------- hashes
#: Bytes read of one tensor of each expert.
HASHED_BYTES = 512

#: Tensors that are tried until one tells all experts apart.
_TRIES = 3


@dataclass(frozen=True)
class ExpertSamples:
    """Hashes by router and expert; None for a router whose experts are not found."""

    digests: Mapping[str, Sequence[str] | None]
    bytes_read: int


def read_expert_samples(store: TensorStore, routers: Sequence[Router]) -> ExpertSamples:
    """The first 512 bytes of one tensor of each expert, hashed: enough to know it again.

    Experts are the tensors ``experts.<number>.*`` beside the router, or one tensor ``experts.*``
    with an entry for each expert. The same tensor is taken for every expert: the first by name that
    tells them all apart; None when none of the first three does.
    """
    before = store.bytes_read
    store = with_plain_names(store)
    layers = layer_names(store.names())
    digests = {router.name: _samples(store, router, layers) for router in routers}
    return ExpertSamples(digests, store.bytes_read - before)


def _samples(store: TensorStore, router: Router, layers: LayerNames) -> list[str] | None:
    """Numbered experts before stacked ones; of these matrices before vectors, which may be 0."""
    start, own = layer_of(router)
    folder, num = own.rpartition(".")[0].rpartition(".")[0] + ".experts.", router.num_experts
    layer = layers.get(start, {})
    beside = [layer[alike] for alike in sorted(layer) if alike.startswith(folder)]
    try:
        numbered = [names for names in beside if names.keys() == set(range(num))]
        one = [names[-1] for names in beside if -1 in names]
        shapes = {name: store.info(name).shape for name in ([] if numbered else one)}
        whole = [name for name in one if len(shapes.get(name, ())) > 1 and shapes[name][0] == num]
        stacked = sorted(whole, key=lambda name: -len(shapes[name]))
        for names in numbered[:_TRIES] or [{-1: name} for name in stacked[:_TRIES]]:
            digests = [
                _digest(store, names[e], 0, 1) if e in names else _digest(store, names[-1], e, num)
                for e in range(num)
            ]
            if len(set(digests)) == num:
                return digests
    except CheckpointError:
        pass  # experts in shards that are not there: nothing is known of them
    return None


def _digest(store: TensorStore, name: str, part: int, num_parts: int) -> str:
    """Hash of the beginning of one of ``num_parts`` equal parts of a tensor."""
    size = store.info(name).size_bytes // num_parts
    raw = store.read_bytes(name, part * size, min(size, HASHED_BYTES))
    return digest_of(bytes(raw))


# ------------------------------------------------------------------------------------------- widths
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

#: Formats that hold more than a number in each element.
_PACKED = frozenset({"U8", "I32", "U32"})


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
    store: TensorStore, router: Router, names: LayerNames, option: int | None = None
) -> ExpertShape:
    """The width of the experts of a router: ``option``, or that of the config, as shapes confirm.

    ``store`` and ``names`` are plain (``layer_names``).

    Raises
    ------
    RouterError
        Where config and shapes contradict each other, or neither says it.
    """
    try:
        tensors = open_experts(store, router, of_router_inputs=False, names=names)
    except (CheckpointError, RouterError):
        tensors = None
    shared = _shared(store, router, names)
    key, width = ("--width", option) if option is not None else _in_config(store.config, router)
    if tensors is None and width is None:
        raise RouterError(
            f"{store.label}: neither the config nor a tensor says how wide the experts of router "
            f"{router.name} are.",
            "Say it: --width N.",
        )
    if tensors is None:
        assert width is not None
        return ExpertShape(width, None, shared, f"{key}; no tensor of an expert to check it by")
    first = tensors.last.stored.tensors[0].name
    if width not in (None, tensors.width):
        raise RouterError(
            f"{store.label}: {key} says experts of {width:,} neurons, and {first} has "
            f"{tensors.width:,} beside inputs of {router.hidden_size:,}.",
            "One of them is of another model; --width N takes the place of the config.",
        )
    origin = f"shape of {first}" if width is None else f"{key}, as {first} has it"
    return ExpertShape(tensors.width, tensors.is_gated, shared, origin)


def open_headers(store: TensorStore, routers: Iterable[Router], names: LayerNames) -> None:
    """What ``expert_shape`` of these routers reads, at the same time where that saves waiting."""
    layers = (names.get(layer_of(router)[0], {}) for router in routers)
    # of files that are not there nothing is known
    with contextlib.suppress(CheckpointError):
        store.prepare([by[min(by)] for layer in layers for a, by in layer.items() if "exp" in a])


def _in_config(config: Mapping[str, Any], router: Router) -> tuple[str, int | None]:
    settings = Settings(config, CONFIG_ROOTS).at(router.layer)
    for key in _KEYS:
        if settings.has(setting := Setting((key,), range=SOME)):
            return f"config.json: '{key}'", settings.integer(setting)
    return "", None


def _shared(store: TensorStore, router: Router, names: LayerNames) -> int:
    """Neurons of all shared experts of the layer together; 0 where there are none."""
    others: list[int] = []
    for alike, by_number in names.get(layer_of(router)[0], {}).items():
        module, part = parted(alike)
        if SHARED.search(module) and part in ("weight", "") and "norm" not in module:
            with contextlib.suppress(CheckpointError):
                info, hidden = store.info(by_number[min(by_number)]), router.hidden_size
                if len(info.shape) == 2 and hidden in info.shape and info.dtype not in _PACKED:
                    others.append(info.shape[0] if info.shape[1] == hidden else info.shape[1])
    return min(others, default=0)
