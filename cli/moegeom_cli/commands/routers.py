"""``moegeom list routers``: which routers a checkpoint has; measures nothing."""

from __future__ import annotations

from moegeom.engine.request import RoutersRequest
from moegeom_cli.command import Command, Group
from moegeom_cli.groups import ScreenOptions, with_groups

COMMAND = Command(Group.list, 1, "moegeom list routers CKPT --layers 0-3")


@with_groups
def run(request: RoutersRequest, screen: ScreenOptions) -> None:
    """Which routers a checkpoint has: rule, shape and storage; what was skipped and why."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.studies.routers import document, routers

    store = open_checkpoint(request.checkpoint, request.remote)
    screen.show(document, routers(store, request))
