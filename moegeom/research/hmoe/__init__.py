"""``moegeom hmoe``: what data can tell of gated attention, and what descents show of it."""
