"""``moegeom balance``: why loads are uneven, and which bias would even them."""
