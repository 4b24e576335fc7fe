"""The list of compiled kernels, and timing of their compilation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numba.core import event
from numba.core.registry import CPUDispatcher


def kernels() -> Iterator[CPUDispatcher]:
    """The kernels of the modules that are imported, compiled or not."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "moegeom":
            for value in list(vars(module).values()):
                is_here = isinstance(value, CPUDispatcher) and value.__module__ == name
                # what only kernels call has no place of its own
                if is_here and value.stats.cache_path is not None:
                    yield value


class _First(event.Listener):
    """Calls ``tell`` when the first function is compiled, not when one comes from the cache."""

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell: Callable[[bool], None] | None = tell

    def on_start(self, event: Any) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(event.data["dispatcher"].stats.cache_path is not None)

    def on_end(self, event: Any) -> None:
        """Nothing: who listens says only that it takes a while."""


@dataclass
class Stopwatch:
    """Seconds of some work, without those in which kernels were compiled."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Wall-clock seconds of the block, set when it ends; compiling kernels does not count."""
    watch, compiling = Stopwatch(), event.TimingListener()
    started = time.perf_counter()
    with event.install_listener("numba:compile", compiling):
        yield watch
    watch.seconds = time.perf_counter() - started
    if compiling.done:
        watch.seconds -= compiling.duration


@contextmanager
def told_once(tell: Callable[[bool], None]) -> Iterator[None]:
    """Within it, ``tell`` is called once when a kernel is compiled, from the thread that does.

    With whether the kernel will be kept on disk.
    """
    with event.install_listener("numba:compile", _First(tell)):
        yield
