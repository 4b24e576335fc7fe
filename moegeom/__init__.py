"""Check, measure and compare the routers of Mixture-of-Experts checkpoints.

The names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: Public name -> where it is defined. A name must not be that of a subpackage.
_PUBLIC: dict[str, str] = {
    "MoeGeomError": "moegeom.core.errors:MoeGeomError",
    "Router": "moegeom.core.router:Router",
    "RouterSet": "moegeom.core.router:RouterSet",
    "Finding": "moegeom.core.finding:Finding",
    "ScanRequest": "moegeom.pipeline:ScanRequest",
    "load_routers": "moegeom.router.load:load_routers",
    "open_checkpoint": "moegeom.checkpoint.open:open_checkpoint",
    "open_results": "moegeom.results.reader:open_results",
    "open_tokens": "moegeom.tokens.open:open_tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moegeom' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
