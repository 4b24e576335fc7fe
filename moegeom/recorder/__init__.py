"""Recordings from running models: hooks at every router, to disk or straight into a scan."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegeom.recorder.attention import AttentionRecorder
    from moegeom.recorder.callback import FoldCallback
    from moegeom.recorder.ranks import merge_parts
    from moegeom.recorder.recorder import RouterRecorder

__all__ = ["AttentionRecorder", "FoldCallback", "RouterRecorder", "merge_parts"]

_MODULES = {
    "AttentionRecorder": "attention",
    "FoldCallback": "callback",
    "RouterRecorder": "recorder",
    "merge_parts": "ranks",
}


def __getattr__(name: str) -> Any:
    """A name on first use: what a capture is asked needs no torch, and only one transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moegeom.recorder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moegeom.recorder.{_MODULES[name]}"), name)
