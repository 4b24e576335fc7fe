"""``moegeom diff``: what changed between two checkpoints."""
