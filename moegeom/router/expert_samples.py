"""A short sample of every expert's weights, to tell whether experts moved along with their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of
from moegeom.core.errors import CheckpointError
from moegeom.core.router import Router
from moegeom.router.plain_names import plain_name, with_plain_names

#: Bytes read of one tensor of each expert.
SAMPLE_BYTES = 512

#: Tensors that are tried until one tells all experts apart.
_TRIES = 3

#: ``experts.<number>.<rest>``: one tensor for each expert.
_NUMBERED = re.compile(r"experts\.([0-9]{1,5})\.(.+)")


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
    by_folder = experts_by_folder(store)
    digests = {router.name: _samples(store, router, by_folder) for router in routers}
    return ExpertSamples(digests, store.bytes_read - before)


def experts_by_folder(store: TensorStore) -> dict[str, list[str]]:
    """Names with ``experts.`` in them, sorted, by what stands before that."""
    by_folder: dict[str, list[str]] = {}
    for name in sorted(store.names()):
        folder, separator, _ = name.partition("experts.")
        if separator:
            by_folder.setdefault(folder, []).append(name)
    return by_folder


def folder_of(router: Router) -> str:
    """``model.layers.3.mlp.`` for the router ``model.layers.3.mlp.gate.weight``."""
    return plain_name(router.provenance.tensors[0]).rpartition(".")[0].rpartition(".")[0] + "."


def expert_leaves(folder: str, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Tensors of numbered experts: what stands behind the number, and the name by number."""
    leaves: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name.removeprefix(folder))
        if match:
            leaves.setdefault(match[2], {})[int(match[1])] = name
    return leaves


def _samples(
    store: TensorStore, router: Router, by_folder: Mapping[str, Sequence[str]]
) -> list[str] | None:
    folder = folder_of(router)
    names = by_folder.get(folder, ())
    try:
        return _numbered(store, router, folder, names) or _stacked(store, router, folder, names)
    except CheckpointError:
        return None  # experts in shards that are not there: nothing is known of them


def _numbered(
    store: TensorStore, router: Router, folder: str, names: Sequence[str]
) -> list[str] | None:
    leaves = expert_leaves(folder, names)
    experts = set(range(router.num_experts))
    whole = sorted(leaf for leaf, by_expert in leaves.items() if set(by_expert) == experts)
    for leaf in whole[:_TRIES]:
        by_expert = leaves[leaf]
        digests = [_digest(store, by_expert[expert], 0, 1) for expert in sorted(experts)]
        if len(set(digests)) == len(digests):
            return digests
    return None


def _stacked(
    store: TensorStore, router: Router, folder: str, names: Sequence[str]
) -> list[str] | None:
    experts = router.num_experts
    shapes = {name: store.info(name).shape for name in names}
    stacked = [n for n, shape in shapes.items() if shape[:1] == (experts,) and len(shape) > 1]
    # matrices before vectors: biases may all be zero
    for name in sorted(stacked, key=lambda n: -len(shapes[n]))[:_TRIES]:
        digests = [_digest(store, name, expert, experts) for expert in range(experts)]
        if len(set(digests)) == experts:
            return digests
    return None


def _digest(store: TensorStore, name: str, part: int, num_parts: int) -> str:
    """Hash of the beginning of one of ``num_parts`` equal parts of a tensor."""
    size = store.info(name).size_bytes // num_parts
    raw = store.read_bytes(name, part * size, min(size, SAMPLE_BYTES))
    return digest_of(bytes(raw))
