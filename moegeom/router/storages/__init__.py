"""Storage schemes of router weights; what they share stands in `moegeom/router/storage.py`."""
