"""The console script ``moegeom``, and ``python -m moegeom_cli``: how a process begins and ends."""

from __future__ import annotations

import os
import signal
import sys

from moegeom_cli import EXIT_INTERRUPTED, is_interruption


def main() -> None:
    """Runs the command line and exits with its exit code; with 130 by Ctrl-C, whenever it comes."""
    code = EXIT_INTERRUPTED
    try:
        from moegeom_cli import app

        code = app.exit_code(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left but the way out
    except BaseException as error:
        if not is_interruption(error):
            raise
        os.write(2, b"interrupted.\n")
    if code == EXIT_INTERRUPTED:  # Python would end by the signal where it passed through an exec
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    # Python puts the working directory first: what lies there is judged, not run.
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
