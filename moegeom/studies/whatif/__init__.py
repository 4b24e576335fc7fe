"""``moegeom whatif``: what other routers would choose on the same tokens."""
