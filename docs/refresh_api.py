"""Writes docs/api.md from the docstrings of moegeom/api.py: `python docs/refresh_api.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import moegeom as mg
from moegeom import api
from moegeom.document.report import GateReport, Report, ScanReport
from moegeom.engine.parameters import family_parameters, shared_fields
from moegeom.engine.request import Terms
from moegeom.engine.route import RoutedTokens
from moegeom.router.requested_family import NOTHING_ASKED
from moegeom.studies.opened import Checkpoint, Recording
from moegeom.studies.study import studies

HEAD = (
    "# From Python\n\n"
    "Written by `docs/refresh_api.py` from the docstrings of `moegeom/api.py`; every example runs "
    "in the tests.\n\n"
)

#: Functions in the order of the page: the main road, then studies as the help orders them.
_STUDIES = sorted(studies().values(), key=lambda one: (one.group, one.place))
FUNCTIONS = [
    name
    for name in dict.fromkeys((*mg._PUBLIC, *(one.name for one in _STUDIES)))
    if inspect.isfunction(getattr(mg, name))
]

#: What ``watch`` means, which is no option.
_WATCH = "Is told how the work goes on: `start`, `begin`, `advance`, `say`."

#: What functions give back.
CLASSES = (Checkpoint, Recording, Report, GateReport, ScanReport, RoutedTokens)


def api_page() -> str:
    """The whole page."""
    parts = [HEAD + _prose(inspect.getdoc(api) or "")]
    parts += [part for name in FUNCTIONS for part in _function(name)]
    parts += [
        "## Parameters of many functions",
        _prose(inspect.getdoc(Terms) or ""),
        _table("scan", _shared()),
    ]
    parts.append("## What they give back")
    parts += [part for kind in CLASSES for part in _class(kind)]
    return "\n\n".join(parts) + "\n"


def _function(name: str) -> Iterator[str]:
    function = getattr(mg, name)
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    yield f"## {name}"
    more = ["..."] * (len(shown) < len(signature.parameters))
    yield f"`mg.{name}({', '.join([*map(_bare, shown), *more])})`"
    yield from _described(inspect.getdoc(function) or "")
    own = [
        p.name
        for p in signature.parameters.values()
        if p.kind is p.KEYWORD_ONLY and (p.name not in _shared() or name == "open")
    ]
    if own:
        yield _table(name, own)


def _class(kind: type) -> Iterator[str]:
    yield f"### {kind.__name__}"
    yield from _described(inspect.getdoc(kind) or "")
    rows = [
        (attribute, (inspect.getdoc(found) or "").partition("\n")[0])
        for attribute, found in vars(kind).items()
        if not attribute.startswith("_") and inspect.getdoc(found) and not _is_plain(found)
    ]
    if rows:
        yield "\n".join(
            ["| | |", "|---|---|", *(f"| `{a}` | {_prose(text)} |" for a, text in rows)]
        )


def _is_plain(found: Any) -> bool:
    return isinstance(found, str | int | float | type | None) or dataclasses.is_dataclass(found)


def _shared() -> list[str]:
    return ["watch", *shared_fields(Terms)[:-2], "remote", *family_parameters(NOTHING_ASKED)]


def _bare(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


def _table(function: str, names: Iterable[str]) -> str:
    parameters = inspect.signature(getattr(mg, function)).parameters
    meanings = {"watch": _WATCH, **getattr(mg, function).meanings}
    lines = ["| parameter | default | |", "|---|---|---|"]
    for name in names:
        text = meanings[name].replace("|", "\\|")
        lines.append(f"| `{name}` | `{parameters[name].default!r}` | {text} |")
    return "\n".join(lines)


def _described(doc: str) -> Iterator[str]:
    """A docstring: prose, what is raised, examples."""
    doc = re.sub(r"^Parameters\n-+\n(.+\n    .+\n?)+\n*", "", doc, flags=re.MULTILINE)
    sections = re.split(r"^(Raises|Examples)\n-+\n", doc, flags=re.MULTILINE)
    yield _prose(sections[0])
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title == "Examples":
            yield f"```pycon\n{body.strip()}\n```"
        else:
            entries = re.findall(r"^(\w+)\n((?: +.*\n?)+)", body, flags=re.MULTILINE)
            yield "Raises:\n\n" + "\n".join(
                f"- `{kind}`: {_prose(' '.join(text.split()))}" for kind, text in entries
            )


def _prose(text: str) -> str:
    """A paragraph in a line, names in backticks."""
    text = re.sub(r":func:`(\w+)`", r"`\1`", text.strip()).replace("``", "`")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(api_page(), encoding="utf-8")
