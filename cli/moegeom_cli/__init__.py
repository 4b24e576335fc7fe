"""The command line of moegeom: one file per command, no logic."""

#: Ctrl-C, whenever it comes.
EXIT_INTERRUPTED = 130


def is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: compiled code turns one into an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
