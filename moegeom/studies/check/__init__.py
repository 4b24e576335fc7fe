"""``moegeom check``: may this checkpoint ship?"""
