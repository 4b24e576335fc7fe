"""Figures of results, kin in one file; see :mod:`moegeom.document.drawing`."""
