"""Writes moegeom/__init__.pyi, the types of what programs call: `python docs/refresh_stubs.py`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import moegeom as mg
from moegeom.studies.study import studies

HEAD = "# Written by docs/refresh_stubs.py from the requests of the functions; a test holds it.\n"

#: What is made a field of a request by more than its type says.
_TYPED = {"layers": "str | int | Iterable[int] | None"}

#: Names that annotations of the functions use, and where they come from.
_NAMES: dict[str, str] = {
    "Any": "typing",
    "Iterable": "collections.abc",
    "Literal": "typing",
    "Mapping": "collections.abc",
    "Path": "pathlib",
}


def stub() -> str:
    """The whole file."""
    functions, classes = [], []
    for name in dir(mg):
        public = getattr(mg, name)
        if inspect.isfunction(public):
            functions.append(_function(name, public))
        elif inspect.isclass(public):
            classes.append(f"from {public.__module__} import {public.__name__} as {name}")
    body = "\n\n".join(functions)
    used = set(re.findall(r"\b[A-Za-z]\w*\b", body)) - {name.split()[-1] for name in classes}
    imports = [f"from {_NAMES[name]} import {name}" for name in sorted(used & _NAMES.keys())]
    return "\n".join([HEAD, *imports, *classes, "", "__version__: str", "", body]) + "\n"


def _function(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    _NAMES.update(_imported(inspect.unwrap(function)))
    answer = _text(signature.return_annotation)
    if name in studies():
        run = studies()[name].load("run")
        answer = f"Report[{_text(inspect.signature(run).return_annotation)}]"
        _NAMES.update(_imported(run))
    parameters = "".join(f"    {parameter},\n" for parameter in _parameters(signature))
    return f"def {name}(\n{parameters}) -> {answer}: ..."


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        default = "" if parameter.default is parameter.empty else " = ..."
        text = _TYPED.get(parameter.name) or _text(parameter.annotation)
        yield f"{parameter.name}: {text}{default}"


def _text(hint: Any) -> str:
    """The annotation as a program may fill it: a path as text, one value for several."""
    if isinstance(hint, str):
        return hint
    return " | ".join(dict.fromkeys(_members(hint)))


def _members(hint: Any) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _members(argument)
    elif hint is type(None):
        yield "None"
    elif hint is Path:
        yield from ("str", "Path")
    elif origin is Literal:
        yield f"Literal[{', '.join(map(repr, arguments))}]"
    elif origin in (tuple, Sequence):
        yield from _members(arguments[0])
        yield f"Iterable[{_text(arguments[0])}]"
    elif origin is Mapping:
        yield f"Mapping[{_text(arguments[0])}, {_text(arguments[1])}]"
    elif hint is Any:
        yield "Any"
    else:
        if hint.__module__ != "builtins":
            _NAMES[hint.__name__] = hint.__module__
        yield hint.__name__


def _imported(function: Any) -> dict[str, str]:
    """Names that the module of a function imports, and from where, and its own classes."""
    file = Path(str(sys.modules[function.__module__].__file__))
    tree = ast.parse(file.read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    own = {node.name: function.__module__ for node in tree.body if isinstance(node, ast.ClassDef)}
    named = {**own, **{name.name: str(node.module) for node in imports for name in node.names}}
    return {name: module for name, module in named.items() if name[0].isupper()}


if __name__ == "__main__":
    Path(mg.__file__).with_suffix(".pyi").write_text(stub(), encoding="utf-8")
