"""The question that ``moegeom cells`` answers, step by step."""
