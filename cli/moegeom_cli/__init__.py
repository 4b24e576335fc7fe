"""The command line of moegeom: one file per command, no logic."""

#: Ctrl-C, whenever it comes.
EXIT_INTERRUPTED = 130
