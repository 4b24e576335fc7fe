"""One TOML file per model family; its schema is ``moegeom.router.family``."""
