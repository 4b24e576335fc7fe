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
    total = sum(one.bytes_of(gate_alone=True) for one in tensors)
    announce_bytes(total, "of experts are", is_asked, watch)


def announce_bytes(
    total: int,
    what: str,
    is_asked: bool,
    watch: Watch | None,
    done: str = "read",
    of: str = "experts",
) -> None:
    """The same of a number of bytes; ``what`` goes on with ``to be read``, ``done`` for another.

    ``of`` is whose they are.

    Raises
    ------
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    if total > _UNASKED and not is_asked:
        raise UsageError(
            f"{size(total)} {what} to be {done}.",
            "Say --yes, or ask for fewer layers: --layers L.",
        )
    if watch and total > _UNSAID:
        watch.say(f"reads {size(total)} of {of}")


def announce_experts(opened: Session, is_asked: bool, watch: Watch | None) -> None:
    """Says how much is read at most: all experts of the recorded routers whose choice follows.

    Raises
    ------
    RouterError
        When a checkpoint has no experts, or they are stored in a way that is not known.
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    routers = [router for router in opened.recorded if not router.listed]
    total = sum(open_expert_functions(opened.store, router).bytes_of() for router in routers)
    announce_bytes(total, "of experts are, at most,", is_asked, watch)
