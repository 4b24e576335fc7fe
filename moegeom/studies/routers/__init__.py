"""``moegeom routers``: which routers a checkpoint has; measures nothing."""
