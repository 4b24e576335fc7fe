"""URLs, what of them may be printed, and what a caller may choose about what lies behind them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

#: ``s3://``, and the chains of fsspec such as ``filecache::s3://``.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)

#: Characters of an address in a sentence.
_ADDRESS_CHARACTERS = 500


def scheme_of(text: str) -> str:
    """The scheme of a URL in small letters; "" for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


#: What a browser shows of a model of the hub: its page, a folder or a file of a revision.
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)

#: Pages of the hub that are of no model.
_OTHER_PAGES = frozenset(
    "api blog collections datasets docs join models organizations papers posts settings spaces "
    "tasks".split()
)


def hub_url(url: str) -> str:
    """``hf://`` for the address of a model's page on the hub; any other URL as it is."""
    match = _HUB_PAGE.fullmatch(url)
    if match is None or match["repo"].partition("/")[0].lower() in _OTHER_PAGES:
        return url
    revision = f"@{match['revision']}" if match["revision"] else ""
    return f"hf://{match['repo']}{revision}{unquote(match['path'] or '').rstrip('/')}"


def shown(url: str) -> str:
    """A URL without user, password, query and fragment, any of which may be a credential."""
    head, mark, rest = url.partition("://")
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return head + mark + authority.rpartition("@")[2] + slash + path


def cut(text: str) -> str:
    """A text that fits into a sentence."""
    return text if len(text) <= _ADDRESS_CHARACTERS else f"{text[:_ADDRESS_CHARACTERS]}..."


def child(folder: str, name: str) -> str:
    """The URL of a file in a folder; the query, which may be a credential, goes with it."""
    parts = urlsplit(folder)
    path = f"{parts.path.rstrip('/')}/{quote(name, safe='/')}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def split_last(url: str) -> tuple[str, str]:
    """The URL of the folder, and the last part of its path as it is quoted; "" if it has none."""
    parts = urlsplit(url)
    folder, _, last = parts.path.rstrip("/").rpartition("/")
    return urlunsplit((parts.scheme, parts.netloc, folder, parts.query, "")), last


# ------------------------------------------------------------------------------------------ options
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
