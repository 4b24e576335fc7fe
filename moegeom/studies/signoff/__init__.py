"""``moegeom signoff``: may an export stand for its original?"""
