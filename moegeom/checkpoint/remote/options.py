"""What a caller may choose about remote checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


def user_cache_folder(environment: Mapping[str, str], home: Path, platform: str) -> Path:
    """Where programs of this platform keep what they can fetch again.

    ``XDG_CACHE_HOME`` counts on every platform; a relative one does not, as its specification says.
    """
    chosen = environment.get("XDG_CACHE_HOME", "")
    if Path(chosen).is_absolute():
        return Path(chosen) / "moegeom"
    if platform == "darwin":
        return home / "Library" / "Caches" / "moegeom"
    if platform == "win32":
        return Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local") / "moegeom"
    return home / ".cache" / "moegeom"


def _default_cache_folder() -> Path | None:
    try:
        return user_cache_folder(os.environ, Path.home(), sys.platform)
    except RuntimeError:  # a user without a home
        return None


@dataclass(frozen=True)
class RemoteOptions:
    """Patience, parallelism, cache and credentials; the defaults suit the public hub.

    Parameters
    ----------
    num_parallel
        Requests at the same time, at most.
    attempts
        How often a request is made before its failure is an error.
    timeout_s
        Seconds without a byte after which an attempt has failed.
    backoff_s
        Wait before the second attempt, within a factor of 1.5; twice as long before each next one.
    longest_wait_s
        A server that asks for a longer pause than this is not waited for.
    cache_folder
        Where headers and routers are kept; None keeps none.
    cache_bytes
        Size of that folder above which the oldest files go.
    hub_endpoint, hub_token
        Those that huggingface_hub finds (``HF_ENDPOINT``, ``HF_TOKEN``, ``hf auth login``) when
        None.
    sleep
        How to wait.
    """

    num_parallel: int = 8
    attempts: int = 5
    timeout_s: float = 30.0
    backoff_s: float = 0.5
    longest_wait_s: float = 120.0
    cache_folder: Path | None = field(default_factory=_default_cache_folder)
    cache_bytes: int = 512_000_000
    hub_endpoint: str | None = None
    hub_token: str | None = field(default=None, repr=False)
    sleep: Callable[[float], None] = time.sleep
