"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

from dataclasses import replace

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, ScreenOptions, with_groups
from moegeom_cli.options import Checkpoint

COMMAND = Command(Group.measure, 1, "moegeom routers CKPT --layers 0-3")


@with_groups
def run(checkpoint: Checkpoint, model: ModelOptions, screen: ScreenOptions) -> None:
    """Which routers a checkpoint has: rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.document.requested_layers import layers_without_router
    from moegeom.engine.request import Terms
    from moegeom.router.load import load_routers
    from moegeom.studies.routers.document import document

    terms = Terms(**model.terms)
    store = open_checkpoint(checkpoint, terms.remote)
    found = load_routers(store, terms.layers, terms.asked)
    absent = layers_without_router(terms.layers, (router.name for router in found.routers))
    screen.show(document, replace(found, notes=(*found.notes, *filter(None, [absent]))))
