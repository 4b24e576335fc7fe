"""``moegeom explain``: why two runs chose different experts."""
