"""Where options and checkpoint disagree: sentences, since what somebody says counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moegeom.checkpoint.store import TensorStore
from moegeom.core.router import Router
from moegeom.router.proposal import expert_counts, propose_routers

#: Phrases of evidence, a name among them, that make a router likely.
_MUCH = 3


def asked_notes(store: TensorStore, routers: Sequence[Router]) -> list[str]:
    """Sentences on routers that a pattern loaded: numbers of experts, and what it leaves out."""
    return [*_counts(store, routers), *_left_out(store, routers)]


def _counts(store: TensorStore, routers: Sequence[Router]) -> Iterator[str]:
    said = expert_counts(store)
    odd = [router for router in routers if said and router.num_experts not in said]
    if odd:
        first = odd[0]
        listed = " or ".join(map(str, sorted(said)[:3]))
        # a matrix that lies on its side has the number of experts as its width
        on_side = " (stored transposed?)" if first.hidden_size in said else ""
        yield (
            f"{first.name}: {first.num_experts} rows count as experts, where config.json says "
            f"{listed}{on_side}"
        )


def _left_out(store: TensorStore, routers: Sequence[Router]) -> Iterator[str]:
    loaded = {name for router in routers for name in router.provenance.tensors}
    counts = expert_counts(store) | {router.num_experts for router in routers}
    for candidate in propose_routers(store):
        left = [name for name in candidate.names if name not in loaded]
        is_likely = candidate.has_router_name and len(candidate.evidence) >= _MUCH
        if left and is_likely and min(candidate.shape) in counts:
            noun = "tensor" if len(left) == 1 else "tensors"
            yield f"not loaded: {len(left)} {noun} like '{left[0]}', which may be routers too"
