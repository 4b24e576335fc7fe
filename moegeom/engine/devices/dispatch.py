"""Which loop does a task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from moegeom.engine.devices.cuda import scan_on_devices
from moegeom.engine.devices.device_router import refusal
from moegeom.engine.loop import Progress, scan_router
from moegeom.engine.task import Task
from moegeom.kernels.cuda.device import Device


def engine_for(
    task: Task,
    devices: Sequence[Device],
    batch_tokens: int | None = None,
    said: Callable[[str], None] | None = None,
) -> Callable[..., Progress]:
    """The loop on the devices where there are any that can do the task, else the processor's.

    ``batch_tokens`` is what a user asked for; ``said`` hears why a task stays on the
    processor though there are devices.
    """
    if not devices:
        return scan_router
    if reason := refusal(task):
        if said:
            said(f"router {task.prepared.router.name}: on the processor, since {reason}")
        return scan_router
    return functools.partial(scan_on_devices, devices=devices, batch_tokens=batch_tokens, said=said)
