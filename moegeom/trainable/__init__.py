"""Router modules for a model of one's own, in torch (extra ``torch``); docs/trainable.md.

The names below load on first use. Without torch the package cannot be imported, and the error
names the extra.
"""

from __future__ import annotations

import importlib
from typing import Any

from moegeom.core.extras import refuse_absent

refuse_absent("torch", "torch", "moegeom.trainable")

#: Public name -> the module that defines it.
_PUBLIC: dict[str, str] = {
    "Routed": "router",
    "RouterModule": "router",
    "TopKRouter": "top_k",
    "SmoothTopKRouter": "continuous",
    "SmoothCosineRouter": "continuous",
    "parameter_groups": "continuous",
    "ReLURouter": "continuous",
    "update_strength": "continuous",
    "CosineRouter": "top_k",
    "CentredRouter": "top_k",
    "upcycle": "upcycling",
    "export_upcycled": "upcycling",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moegeom.trainable' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moegeom.trainable.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
