"""Making millions of objects without searching them for garbage in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """While it is open, Python does not search for garbage in cycles.

    A parser makes none, and every search walks through all that it has made so far. It may be
    nested and opened by several threads: afterwards the search is as it was before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
