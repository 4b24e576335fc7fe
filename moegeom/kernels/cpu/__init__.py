"""Numba kernels, named and typed as in ``reference``; compiled on first use, then cached on disk.

A kernel is a thin typed function, which allocates the outputs, around one compiled loop.
Loops release the GIL. Fast-math flags are given only where no infinity or nan can arise that
matters, and only those that allow another order of summation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from numba import njit

#: Options of ``numba.njit`` for what only compiled functions call: no wrappers for Python, cached
#: as a part of their callers only, and division by zero as in NumPy.
INNER: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
#: The same for functions that allocate nothing: arrays that are handed on are not counted. With
#: tuples of many arrays that counting took half of the time.
UNCOUNTED: dict[str, Any] = {**INNER, "_nrt": False}
#: The same for what is called in one place: taken into its caller before anything is compiled. What
#: is called is otherwise made once more, to machine code, within each of its callers.
ONCE: dict[str, Any] = {**UNCOUNTED, "inline": "always"}
#: Options of :func:`kernel` for one of that kind: all room is handed in.
COUNTLESS: dict[str, Any] = {"error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``numba.njit`` of what Python calls, kept on disk.

    Numba keeps it beside its source or, where nobody may write there, in the user's cache; the
    folder of ``NUMBA_CACHE_DIR`` comes before both. Where none of them can be written, as in a
    container whose disks are read-only, each process compiles what it needs.
    """

    def made(loop: Callable[..., Any]) -> Callable[..., Any]:
        compiled = njit(nogil=True, **options)(loop)
        with contextlib.suppress(RuntimeError):
            compiled.enable_caching()
        return compiled

    return made
