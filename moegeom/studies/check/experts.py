"""What a sample of each expert tells the checks: how far experts lie apart, router by router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moegeom.core.errors import CheckpointError, RouterError
from moegeom.engine.session import Session
from moegeom.router.expert_beginnings import Beginning, expert_beginnings
from moegeom.router.expert_tensors import open_experts


def expert_facts(opened: Session, announce: Callable[[str], None]) -> dict[str, Any]:
    """``matrices`` with what ``expert_spread`` finds in each, and routers that are left out.

    What is not known is None. ``announce`` is told how much is read before it is.
    """
    from moegeom.geometry.expert_spread import expert_spread  # which loads scipy

    left_out: list[dict[str, str]] = []
    found: list[tuple[str, Beginning]] = []
    for router in (router for router in opened.chosen if not router.listed):
        try:
            if router.num_experts < 2:
                raise RouterError("one expert lies apart from none.")
            beginnings = expert_beginnings(open_experts(opened.store, router))
            found += [(router.name, beginning) for beginning in beginnings]
        except (CheckpointError, RouterError) as error:
            left_out.append({"router": router.name, "reason": error.message.rstrip(".")})
    announce(f"reads {sum(one.size for _, one in found):,} bytes of experts")
    matrices: list[dict[str, Any]] = []
    for name, beginning in found:
        try:
            spread = expert_spread(beginning.read(), beginning.unit)
        except (CheckpointError, RouterError) as error:
            left_out.append({"router": name, "reason": error.message.rstrip(".")})
            continue
        facts = dataclasses.asdict(spread) | {"farthest": spread.farthest}
        known = {key: None if value != value else value for key, value in facts.items()}
        matrices.append({"router": name, "matrix": beginning.matrix, **known})
    return {"matrices": matrices, "left_out": left_out}
