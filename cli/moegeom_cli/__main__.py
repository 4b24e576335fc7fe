"""``python -m moegeom_cli`` is the console script ``moegeom``."""

from __future__ import annotations

from moegeom_cli.app import main

if __name__ == "__main__":
    main()
