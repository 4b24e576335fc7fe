"""Says when kernels are compiled, which takes seconds once; later they come from a cache."""

from __future__ import annotations

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
