"""Short names of routers on a screen, and layers that were asked for and have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moegeom.core.router import format_layers, parse_layers
from moegeom.core.row_keys import layer_of


def place(router: str, routers: Iterable[str]) -> str:
    """``31`` for ``model/31`` when all of them are in one stack and slot, else the whole name."""
    names = [name.split("/") for name in routers]
    is_plain = len({parts[0] for parts in names}) == 1 and all(len(p) == 2 for p in names)
    return router.split("/")[1] if is_plain else router


def span(routers: Sequence[str], first: str) -> str:
    """``31-33`` for routers that follow each other, beginning with ``first`` as a screen calls it.

    Slots of one layer, and stacks, are named from the first to the last.
    """
    (stack, begin, *slot), (last, end, *other) = routers[0].split("/"), routers[-1].split("/")
    is_run = stack == last and int(end) - int(begin) == len(routers) - 1
    if slot or other or not is_run:
        return f"{routers[0]} to {routers[-1]}"
    return f"{first}-{end}"


def layers_without_router(layers: str | None, routers: Iterable[str]) -> str:
    """``layer 7 was asked for and has no router``; empty when every layer has one.

    ``layers`` is the text of ``--layers``, ``routers`` are the names of all routers.
    """
    if layers is None:
        return ""
    absent = parse_layers(layers) - {layer_of(name) for name in routers}
    if not absent:
        return ""
    several = len(absent) > 1
    template = "s {} were asked for and have" if several else " {} was asked for and has"
    return f"layer{template.format(format_layers(absent))} no router"
