"""URLs: what is one, and what of it may be printed."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit, urlunsplit

#: ``s3://``, and the chains of fsspec such as ``filecache::s3://``.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)

#: Characters of an address in a sentence.
_ADDRESS_CHARACTERS = 500


def scheme_of(text: str) -> str:
    """The scheme of a URL in small letters; "" for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


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
