"""Announces large reads of expert weights, and refuses those above 2 GB without --yes."""

from __future__ import annotations

from collections.abc import Callable

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.document.header import size
from moegeom.engine.session import Session
from moegeom.pipeline import Watch
from moegeom.router.expert_functions import open_expert_functions

#: Bytes that are read without a word, and without asking.
_UNSAID, _UNASKED = 10**7, 2 * 10**9


def announce_bytes(
    total: int,
    subject: str,
    is_asked: bool,
    watch: Watch | None,
    verb: str = "read",
    noun: str = "experts",
    is_most: bool = False,
) -> None:
    """Announces that ``total`` bytes will be read: ``reads 3.1 GB of experts``.

    The error says ``{total} {subject} to be {verb}``, the announcement ``of {noun}``; both say
    "at most" where it may be less (``is_most``).

    Raises
    ------
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    if total > _UNASKED and not is_asked:
        raise UsageError(
            f"{size(total)} {subject}{', at most,' if is_most else ''} to be {verb}.",
            "Say --yes, or ask for fewer layers: --layers L.",
        )
    if watch and total > _UNSAID:
        watch.say(f"reads {'at most ' if is_most else ''}{size(total)} of {noun}")


def announce_experts(
    opened: Session,
    is_asked: bool,
    watch: Watch | None,
    most: Callable[[Router], int] | None = None,
) -> None:
    """Announces the most that can be read: all experts of recorded routers that choose by input,
    or as many as ``most`` says of each.

    Raises
    ------
    RouterError
        When a checkpoint has no experts, or they are stored in a way that is not known.
    UsageError
        When it is more than 2 GB, and not asked for.
    """
    routers = [router for router in opened.recorded if not router.listed]
    total = 0
    for router in routers:
        number = router.num_experts if most is None else min(most(router), router.num_experts)
        total += open_expert_functions(opened.store, router).bytes_of(range(number))
    announce_bytes(total, "of experts are", is_asked, watch, is_most=True)
