"""Recordings from running models: hooks at every router, to disk or straight into a scan."""

from moegeom.capture.parts import merge_parts
from moegeom.capture.recorder import RouterRecorder

__all__ = ["RouterRecorder", "merge_parts"]
