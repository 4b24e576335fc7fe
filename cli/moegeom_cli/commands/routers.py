"""``moegeom routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ModelOptions, ScreenOptions, with_groups
from moegeom_cli.options import Checkpoint

COMMAND = Command(Group.measure, 1, "moegeom routers CKPT --layers 0-3")


@with_groups
def run(checkpoint: Checkpoint, model: ModelOptions, screen: ScreenOptions) -> None:
    """Which routers a checkpoint has: rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.engine.parameters import request_of
    from moegeom.engine.request import Terms
    from moegeom.studies.routers.document import document
    from moegeom.studies.routers.study import routers

    terms = request_of(Terms, **model.terms)
    screen.show(document, routers(open_checkpoint(checkpoint, terms.remote), terms))
