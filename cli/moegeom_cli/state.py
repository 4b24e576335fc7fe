"""Where moegeom keeps what it learns from one call to the next."""

from __future__ import annotations

from pathlib import Path

import click


def rules_folder() -> Path:
    """Verified rules by fingerprint, in the user's folder for application data."""
    return Path(click.get_app_dir("moegeom")) / "rules"
