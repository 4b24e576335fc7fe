"""Recordings of moegeom: written, resumed, merged, read."""
