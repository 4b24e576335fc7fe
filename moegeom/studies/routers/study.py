"""``moegeom routers``: which routers a checkpoint has."""

from __future__ import annotations

from dataclasses import replace

from moegeom.checkpoint.store import TensorStore
from moegeom.core.router import RouterSet
from moegeom.document.requested_layers import layers_without_router
from moegeom.engine.request import ModelTerms
from moegeom.router.load import load_routers


def routers(store: TensorStore, terms: ModelTerms) -> RouterSet:
    """The routers of the layers asked for, with a note on layers that have none.

    Raises
    ------
    RouterError
        When there is none, or one that cannot be interpreted.
    """
    model = load_routers(store, terms.layers, terms.asked)
    absent = layers_without_router(terms.layers, (router.name for router in model.routers))
    return replace(model, notes=(*model.notes, absent)) if absent else model
