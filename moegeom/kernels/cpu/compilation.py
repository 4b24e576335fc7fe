"""Says when kernels are compiled, which takes seconds once; later they come from a cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event


class _First(event.Listener):
    """Calls ``tell`` when the first function is compiled, not when one comes from the cache."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: Any) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, event: Any) -> None:
        """Nothing: who listens says only that it takes a while."""


@contextmanager
def told_once(tell: Callable[[], None]) -> Iterator[None]:
    """Within it, ``tell`` is called once when a kernel is compiled, from the thread that does."""
    with event.install_listener("numba:compile", _First(tell)):
        yield


class WorkClock(event.Listener):
    """Seconds of work of the thread that made it, without those in which it compiled kernels."""

    def __init__(self) -> None:
        self._thread, self._depth, self._compiled = threading.get_ident(), 0, 0.0
        self._made = self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made, or, within a compilation, until that began."""
        now = self._began if self._depth else time.perf_counter()
        return now - self._made - self._compiled

    def on_start(self, event: Any) -> None:
        """Kernels that others call are compiled within these, and counted with them."""
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self._compiled += time.perf_counter() - self._began


@contextmanager
def work_clock() -> Iterator[WorkClock]:
    """A clock that stands still while this thread compiles kernels within it."""
    clock = WorkClock()
    with event.install_listener("numba:compile", clock):
        yield clock
