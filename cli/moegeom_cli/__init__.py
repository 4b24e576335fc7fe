"""The command line of moegeom: one file per command, no logic."""
