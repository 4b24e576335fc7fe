"""``moegeom boundary-report``: which tokens are about to flip, and under what."""
