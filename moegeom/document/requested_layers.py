"""Requested layers that have no router."""

from __future__ import annotations

from collections.abc import Iterable

from moegeom.core.router import format_layers, parse_layers
from moegeom.core.row_keys import layer_of


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
