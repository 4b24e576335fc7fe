"""``moegeom capacity``: what a router of this size could do at most."""
