"""Says when kernels are compiled, which takes seconds once; later they come from a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numba.core import event


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
    """Seconds of what was done, but for those in which kernels were compiled."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Times what is done within it, by the wall clock; known when it ends."""
    found, compiling = Stopwatch(), event.TimingListener()
    started = time.perf_counter()
    with event.install_listener("numba:compile", compiling):
        yield found
    found.seconds = time.perf_counter() - started
    if compiling.done:
        found.seconds -= compiling.duration


@contextmanager
def told_once(tell: Callable[[bool], None]) -> Iterator[None]:
    """Within it, ``tell`` is called once when a kernel is compiled, from the thread that does.

    With whether the kernel will be kept on disk.
    """
    with event.install_listener("numba:compile", _First(tell)):
        yield
