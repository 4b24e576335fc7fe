"""``moegeom continuity``: does the output of the experts jump at a boundary, and if smoothed?"""
