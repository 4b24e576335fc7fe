"""Engines other than the one of the processor, which is :mod:`moegeom.engine.loop`."""
