"""The short name of a router on a screen."""

from __future__ import annotations

from collections.abc import Iterable


def place(router: str, routers: Iterable[str]) -> str:
    """``31`` for ``model/31`` when all of them are in one stack and slot, else the whole name."""
    names = [name.split("/") for name in routers]
    is_plain = len({parts[0] for parts in names}) == 1 and all(len(p) == 2 for p in names)
    return router.split("/")[1] if is_plain else router
