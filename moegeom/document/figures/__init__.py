"""Figures of results, one file each; see :mod:`moegeom.document.drawing`."""
