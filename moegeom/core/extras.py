"""Packages that only some commands need: said before the work, with what installs them."""

from __future__ import annotations

import importlib.util

from moegeom.core.errors import UsageError


def refuse_absent(package: str, extra: str, what: str) -> None:
    """Raises UsageError when ``package``, which ``extra`` brings and ``what`` needs, is absent."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{what} needs {package}, which is not installed.", f"pip install 'moegeom[{extra}]'"
        )
