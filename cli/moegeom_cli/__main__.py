"""``python -m moegeom_cli`` is the console script ``moegeom``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory first: what lies there is judged, not run.
    if not sys.flags.safe_path:
        del sys.path[0]
    from moegeom_cli.app import main

    main()
