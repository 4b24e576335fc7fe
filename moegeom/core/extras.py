"""Packages that only some commands need: said before the work, with what installs them."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import UsageError

#: Distributions that are not called as the package that they bring.
_DISTRIBUTIONS = {"sklearn": "scikit_learn"}

#: What is installed, and the file of a clone with the versions that its tests ran with.
_NAME, _VERSIONS = "moegeom", "constraints.txt"


def is_installed(package: str) -> bool:
    """Whether a package can be imported; nothing is."""
    return importlib.util.find_spec(package) is not None


def refuse_absent(package: str, extra: str, what: str) -> None:
    """Raises UsageError when ``package``, which ``extra`` brings and ``what`` needs, is absent."""
    if not is_installed(package):
        raise UsageError(f"{what} needs {package}, which is not installed.", install_command(extra))


def left_out(absent: ModuleNotFoundError, what: str) -> UsageError | None:
    """The refusal of ``what``, which needs a package that moegeom requires and that an installation
    for checks of weights leaves out (requirements-check.txt); None for any other package.
    """
    package = (absent.name or "").partition(".")[0]
    try:
        required = distribution(_NAME).requires or ()
    except PackageNotFoundError:
        return None
    names = {
        re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in required if ";" not in line
    }
    if _DISTRIBUTIONS.get(package, package) not in names:
        return None
    return UsageError(f"{what} needs {package}, which is not installed.", install_command())


@functools.cache
def install_command(extra: str = "") -> str:
    """What to type for this installation to have an extra, from where it came itself; without one,
    to have all that moegeom requires.

    A clone, or the address of one, is named again: an index would be asked for moegeom, which is on
    none, and might hand out what somebody else calls so. Where nothing says where it came from, or
    the clone is gone, pip adds the extra to what is installed.
    """
    came_from, extras = _origin(), f"[{extra}]" if extra else ""
    address = urlsplit(str(came_from.get("url", "")))
    commit = (came_from.get("vcs_info") or {}).get("commit_id")
    if commit:
        requirement = f"{_NAME}{extras} @ git+{came_from['url']}@{commit}"
        return f"pip install {shlex.quote(requirement)}"
    clone = Path(url2pathname(unquote(address.path)))
    if address.scheme != "file" or not (clone / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(_NAME + extras)}"
    pinned = clone / _VERSIONS
    versions = f"-c {shlex.quote(str(pinned))} " if pinned.is_file() else ""
    editable = "-e " if (came_from.get("dir_info") or {}).get("editable") else ""
    return f"pip install {versions}{editable}{shlex.quote(f'{clone}{extras}')}"


def _origin() -> dict[str, Any]:
    """Where pip had this installation from (its direct_url.json); empty where that is not said."""
    try:
        origin = parse_json((distribution(_NAME).read_text("direct_url.json") or "{}").encode())
    except (PackageNotFoundError, OSError, DocumentError):
        return {}
    return origin if isinstance(origin, dict) else {}
