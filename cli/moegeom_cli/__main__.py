"""The console script ``moegeom``, and ``python -m moegeom_cli``: how a process begins and ends."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from moegeom_cli import EXIT_INTERRUPTED, is_interruption

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def _unraisable(ignored: UnraisableHookArgs) -> None:
    """What code that cannot raise has ignored: an interruption comes again, behind that code; the
    rest is printed.
    """
    if is_interruption(ignored.exc_value):
        again = threading.Timer(0.01, _thread.interrupt_main)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(ignored)


def main() -> None:
    """Runs the command line and exits with its exit code; with 130 by Ctrl-C, whenever it comes."""
    code, sys.unraisablehook = EXIT_INTERRUPTED, _unraisable
    gc.set_threshold(50_000)  # modules and headers are many objects and little garbage
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
