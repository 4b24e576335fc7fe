"""Recordings from running models: hooks at every router, to disk or straight into a scan."""

from typing import TYPE_CHECKING, Any

from moegeom.recorder.attention import AttentionRecorder
from moegeom.recorder.ranks import merge_parts
from moegeom.recorder.recorder import RouterRecorder

if TYPE_CHECKING:
    from moegeom.recorder.callback import FoldCallback

__all__ = ["AttentionRecorder", "FoldCallback", "RouterRecorder", "merge_parts"]


def __getattr__(name: str) -> Any:
    """The callback on first use: transformers is not needed for the rest."""
    if name != "FoldCallback":
        raise AttributeError(f"module 'moegeom.recorder' has no attribute {name!r}")
    from moegeom.recorder.callback import FoldCallback

    return FoldCallback
