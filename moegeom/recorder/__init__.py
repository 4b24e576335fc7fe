"""Recordings from running models: hooks at every router, to disk or straight into a scan."""

from moegeom.recorder.attention import AttentionRecorder
from moegeom.recorder.parts import merge_parts
from moegeom.recorder.recorder import RouterRecorder

__all__ = ["AttentionRecorder", "RouterRecorder", "merge_parts"]
