"""Writes docs/api.md from the docstrings of moegeom/api.py: `python docs/refresh_api.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import moegeom as mg
from moegeom import api
from moegeom.document.report import GateReport, Report, ScanReport
from moegeom.engine.parameters import in_python
from moegeom.engine.request import Terms
from moegeom.engine.route import RoutedTokens
from moegeom.routing_cells.study.request import CellsRequest
from moegeom.studies.opened import Checkpoint, Recording
from moegeom_cli.command import COMMANDS, Commands, typed_name

HEAD = (
    "# From Python\n\n"
    "Written by `docs/refresh_api.py` from the docstrings of `moegeom/api.py`; every example runs "
    "in the tests.\n\n"
)

#: In the order of the page; what it is called as a command, where that is another name.
FUNCTIONS = (
    *("open", "recording", "scan", "merge", "report", "check", "route", "boundary_report"),
    *(
        "imbalance",
        "cells",
        "capacity",
        "perturb",
        "regions",
        "whatif",
        "outputs",
        "continuity",
    ),
    *("attention", "hmoe", "routes"),
    *("diff", "signoff", "explain", "track"),
)
COMMAND_OF = {"open": "routers"}

#: Commands whose options mean other things.
LISTS = ("capture", "arithmetics", "checks", "doctor", "families", "metrics")

#: What is asked otherwise in Python, or not at all on the command line.
IN_PYTHON = {
    "backend": "`cpu`, or `reference` for the plain NumPy definitions.",
    "batch_tokens": "Tokens that a worker holds at once.",
    "expert": 'The expert that `view="expert"` shows, or whose load `track` follows.',
    "random_experts": "Draws of experts with the same row lengths.",
    "num_workers": "Worker threads; None: one for each processor.",
    "out": "Where to keep it; None keeps nothing.",
    "remote": "`RemoteOptions`: how what is behind a URL is fetched and kept.",
    "router_map": "Key of a foreign array -> router; `layer{i}` -> `text/{i}` for all.",
    "what": "`rates`, ranks and slopes of descents, or `ranks` alone.",
    "watch": "Is told how the work goes on: `start`, `begin`, `advance`, `say`.",
}

#: What functions give back.
CLASSES = (Checkpoint, Recording, Report, GateReport, ScanReport, RoutedTokens)


def api_page() -> str:
    """The whole page."""
    parts = [HEAD + _prose(inspect.getdoc(api) or "")]
    parts += [part for name in FUNCTIONS for part in _function(name)]
    parts += [
        "## Parameters of many functions",
        _prose(inspect.getdoc(Terms) or ""),
        _table(_shared(), "scan"),
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
    own = {
        p.name: p.default
        for p in signature.parameters.values()
        if p.kind is p.KEYWORD_ONLY and (p.name not in _shared() or name == "open")
    }
    if own:
        yield _table(own, COMMAND_OF.get(name, name))


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


def _shared() -> dict[str, Any]:
    parameters = inspect.signature(api.scan).parameters
    common = inspect.signature(mg.imbalance).parameters
    return {n: p.default for n, p in parameters.items() if n in common and n not in _OWN}


#: Named in the signatures themselves.
_OWN = ("checkpoint", "tokens", "out")


def _bare(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


def _table(parameters: dict[str, Any], command: str) -> str:
    meaning = _of_all_commands() | _help(command) | _of_cells() | IN_PYTHON
    lines = ["| parameter | default | |", "|---|---|---|"]
    for name, default in parameters.items():
        lines.append(f"| `{name}` | `{default!r}` | {meaning[name]} |")
    return "\n".join(lines)


def _help(command: str) -> dict[str, str]:
    """What the command line says of the options of a command, in words of Python."""
    found = {}
    for param in Commands().get_command(None, typed_name(command)).params:
        if param.param_type_name == "option" and param.help:
            said = re.sub(r" *\[default: .*?\](?=$)", "", param.help)
            found[param.name] = in_python(said).replace("|", "\\|")
    return found


@cache
def _of_all_commands() -> dict[str, str]:
    names = [name for name in COMMANDS.names() if name not in LISTS]
    return {option: text for name in names for option, text in _help(name).items()}


@cache
def _of_cells() -> dict[str, str]:
    """What the docstring of the request says of what only Python can ask."""
    doc = (inspect.getdoc(CellsRequest) or "").partition("Parameters\n----------\n")[2]
    entries = re.findall(r"^(\w[\w, ]*)\n((?: +.*\n?)+)", doc, flags=re.MULTILINE)
    return {n: " ".join(t.split()) for names, t in entries for n in names.split(", ")}


def _described(doc: str) -> Iterator[str]:
    """A docstring: prose, what is raised, examples."""
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
