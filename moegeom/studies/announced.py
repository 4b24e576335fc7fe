"""What is said, and asked, before bytes of experts are read: they are most of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from moegeom.core.errors import UsageError
from moegeom.document.header import size
from moegeom.engine.session import Session
from moegeom.pipeline import Watch
from moegeom.router.expert_functions import open_expert_functions
from moegeom.router.expert_tensors import ExpertTensors

#: Bytes that are read without a word, and without asking.
_UNSAID, _UNASKED = 10**7, 2 * 10**9


def announce(tensors: Iterable[ExpertTensors], is_asked: bool, watch: Watch | None) -> None:
    """Says how much of the gates is read, where it takes time.

    Raises
    ------
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    announce_bytes(sum(one.bytes_of(gate_alone=True) for one in tensors), is_asked, watch)


def announce_bytes(total: int, is_asked: bool, watch: Watch | None, most: str = "") -> None:
    """The same of so many bytes; ``most`` says where fewer may be read ("up to ").

    Raises
    ------
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    if total > _UNASKED and not is_asked:
        raise UsageError(
            f"{most}{size(total)} of experts are to be read.",
            "Say --yes, or ask for fewer layers: --layers L.",
        )
    if watch and total > _UNSAID:
        watch.say(f"reads {most}{size(total)} of experts")


def announce_experts(opened: Session, is_asked: bool, watch: Watch | None) -> None:
    """Says how much is read at most, of all experts of the recorded routers whose choice follows
    from them.

    Raises
    ------
    RouterError
        When a checkpoint has no experts, or they are stored in a way that is not known.
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    asked = [router for router in opened.recorded if not router.listed]
    total = sum(open_expert_functions(opened.store, router).bytes_of() for router in asked)
    announce_bytes(total, is_asked, watch, "up to ")
