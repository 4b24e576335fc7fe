"""``moegeom track``: a series of checkpoints."""
