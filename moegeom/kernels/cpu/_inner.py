"""How functions are compiled that only compiled functions call."""

from __future__ import annotations

from typing import Any

#: Options of ``numba.njit``: no wrappers for Python, cached as a part of their callers only, and
#: division by zero as in NumPy.
INNER: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
#: The same for functions that allocate nothing: arrays that are handed on are not counted. With
#: tuples of many arrays that counting took half of the time.
UNCOUNTED: dict[str, Any] = {**INNER, "_nrt": False}
