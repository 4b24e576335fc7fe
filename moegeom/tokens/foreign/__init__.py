"""Token arrays that no moegeom command wrote."""
