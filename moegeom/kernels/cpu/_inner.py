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
