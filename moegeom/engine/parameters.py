"""Parameters of requests: how a request is made of them, and how the command line spells them.

A parameter has the name of the field that it fills. The command line writes ``exclude_first`` as
``--exclude-first``; the few that it spells otherwise are listed here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from moegeom.core.errors import MoeGeomError, UsageError
from moegeom.core.registry import unknown_name
from moegeom.core.text import quoted
from moegeom.router.requested_family import RequestedFamily
from moegeom.tokens.files import TokenFiles

P = ParamSpec("P")
R = TypeVar("R")

#: Parameter -> its option, where that is not the same name with dashes.
_SPELLED = {
    "arithmetics": "arith",
    "checkpoint": "from",
    "data_dims": "data-dim",
    "list_what_ifs": "list",
    "log_probs": "logprobs",
    "num_workers": "threads",
    "remote": "no-cache",
    "router_map": "map",
    "splits": "split",
    "starts": "start",
    "what_if_batch": "batch",
    "what_ifs": "router",
}

#: Option -> parameter, the other way round; with a second spelling, and one with its value.
_PARAMETERS = {option: name for name, option in _SPELLED.items()} | {
    "layer": "layers",
    "non-finite skip": "non_finite='skip'",
}

#: Fields of ``Terms.requested_family`` that are called otherwise as parameters of the request.
_OF_FAMILY = {"file": "family", "pattern": "router_pattern"}

#: Parameters that stand for ``Terms.requested_family``.
_OF_ASKED = [_OF_FAMILY.get(f.name, f.name) for f in dataclasses.fields(RequestedFamily)]

#: The other way round.
_FIELD_OF = {parameter: name for name, parameter in _OF_FAMILY.items()}

#: What is typed into a shell, in a message: up to the end of the clause.
_COMMAND = re.compile(r"(`moegeom [^`]*`|\bmoegeom [a-z-]+[^,;`]*)")

_OPTION = re.compile(r"(?<![\w-])--(non-finite skip|[a-z][a-z-]*[a-z])\b")


def option_of(parameter: str) -> str:
    """``--exclude-first`` for ``exclude_first``: a parameter as the command line writes it."""
    return f"--{_SPELLED.get(parameter, parameter.replace('_', '-'))}"


def in_python(text: str) -> str:
    """The text with options written as parameters; commands stay as they are typed."""
    parts = _COMMAND.split(text)
    return "".join(
        part if place % 2 else _OPTION.sub(lambda m: _parameter(m[1]), part)
        for place, part in enumerate(parts)
    )


def _parameter(option: str) -> str:
    return _PARAMETERS.get(option, option.replace("-", "_"))


def parameters_of(record: type) -> dict[str, dataclasses.Field[Any]]:
    """What a request is made of, by name; its ``requested_family`` is taken apart."""
    fields = {field.name: field for field in dataclasses.fields(record)}
    if "requested_family" in fields:
        fields |= dict(zip(_OF_ASKED, dataclasses.fields(RequestedFamily), strict=True))
        del fields["requested_family"]
    return fields


def typed_parameters(record: type) -> dict[str, dataclasses.Field[Any]]:
    """What the command line has as options of a request: its own, then those that others share."""
    hidden = getattr(record, "PYTHON_ONLY", ())
    return {name: f for name, f in ordered_parameters(record).items() if name not in hidden}


def ordered_parameters(record: type) -> dict[str, dataclasses.Field[Any]]:
    """All parameters of a request: its own, then those that others share."""
    parameters = parameters_of(record)
    return {n: parameters[n] for n in dict.fromkeys((*own_parameters(record), *parameters))}


def meaning(field: dataclasses.Field[Any]) -> str:
    """What a parameter means, for a program."""
    facts = field.metadata
    return facts.get("in_python") or in_python(facts["help"])


def own_parameters(record: type) -> list[str]:
    """Parameters of a request that commands do not share, the tokens first."""
    shared = {*shared_fields(record), *_OF_ASKED}
    return sorted((n for n in parameters_of(record) if n not in shared), key="tokens".__ne__)


def hints_of(record: type) -> Mapping[str, Any]:
    """Types of all parameters of a request."""
    family = {_OF_FAMILY.get(name, name): hint for name, hint in _hints(RequestedFamily).items()}
    return {**family, **_hints(record)}


def shared_fields(record: type) -> list[str]:
    """Fields of a request that commands share: those of its bases that say ``IS_SHARED``."""
    bases = (base for base in record.__mro__ if vars(base).get("IS_SHARED"))
    shared = {name for base in bases for name in inspect.get_annotations(base)}
    return [f.name for f in dataclasses.fields(cast("Any", record)) if f.name in shared]


def family_parameters(family: RequestedFamily) -> dict[str, Any]:
    """What describes a family, by the names of the parameters."""
    return {_OF_FAMILY.get(name, name): value for name, value in vars(family).items()}


def request_of(record: type[R], /, **options: Any) -> R:
    """``record`` with these parameters, each made what its field holds.

    A path may be a text and a text a path, one value stands for a tuple of it, numbers stand for
    ``layers``; None stands for the default of a field that may not be None. Parameters that
    describe a family are added to ``requested_family``.

    Raises
    ------
    UsageError
        For a parameter that the record has not, and for a value that its field cannot hold.
    """
    fields = parameters_of(record)
    if unknown := [name for name in options if name not in fields and name != "requested_family"]:
        raise unknown_name("parameter", unknown[0], fields)
    own = {field.name for field in dataclasses.fields(cast("Any", record))}
    values = {name: value for name, value in options.items() if name in own}
    inner = {name: value for name, value in options.items() if name not in own}
    filled = _filled(record, values)
    if inner:
        family = {_FIELD_OF.get(name, name): value for name, value in inner.items()}
        family = _filled(RequestedFamily, family)
        filled["requested_family"] = dataclasses.replace(
            options.get("requested_family") or RequestedFamily(), **family
        )
    return record(**filled)


@functools.cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record)


def _filled(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the fields of the record hold them; those left to their defaults left out."""
    hints = _hints(record)
    filled = {}
    for name, value in values.items():
        kinds = kinds_of(hints[name])
        if value is not None:
            filled[name] = _converted(_OF_FAMILY.get(name, name), value, kinds)
            _refuse_below(cast("Any", record).__dataclass_fields__[name], filled[name])
        elif type(None) in kinds:
            filled[name] = None
    return filled


def _refuse_below(field: dataclasses.Field[Any], value: Any) -> None:
    least = field.metadata.get("min")
    values = value if isinstance(value, tuple) else (value,)
    if least is not None and any(one < least for one in values):
        name = option_of(_OF_FAMILY.get(field.name, field.name))
        raise UsageError(f"{name} {min(values)}: expected {least} or more.")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union; ``str`` stands for words of a list, which who reads them refuses."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(str if get_origin(kind) is Literal else kind for kind in kinds)


def _converted(name: str, value: Any, kinds: Sequence[Any]) -> Any:
    if TokenFiles in kinds and isinstance(value, list | tuple):
        if not all(isinstance(path, str | os.PathLike) for path in value):
            raise UsageError(f"{option_of(name)}: expected paths, found {quoted(value, 40)}.")
        return TokenFiles.of(value)
    inner = {get_origin(kind): get_args(kind) for kind in kinds}
    if items := inner.get(tuple) or inner.get(Sequence):
        if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable):
            value = (value,)
        return tuple(_converted(name, one, kinds_of(items[0])) for one in value)
    if Mapping in inner and isinstance(value, Mapping):
        return {
            _plain(k): _converted(name, v, kinds_of(inner[Mapping][1])) for k, v in value.items()
        }
    if name == "layers" and not isinstance(value, str | int) and isinstance(value, Iterable):
        return ",".join(map(str, value))
    if isinstance(value, str | os.PathLike) and Path in kinds:
        return Path(value)
    if isinstance(value, os.PathLike) and str in kinds:
        return os.fspath(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and _is_text(kinds):
        return str(value)
    plain = {kind for kind in kinds if kind in (bool, int, float, str)}
    if len(plain) == len(kinds) - (type(None) in kinds) and not _fits(value, plain):
        expected = " or ".join(sorted(kind.__name__ for kind in plain))
        raise UsageError(f"{option_of(name)} {quoted(value, 40)}: expected {expected}.")
    if int in plain and not isinstance(value, bool):
        return operator.index(cast("Any", value))  # of whatever library
    return value


def _is_text(kinds: Sequence[Any]) -> bool:
    return str in kinds and not {bool, int, float} & set(kinds)


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _fits(value: Any, kinds: set[Any]) -> bool:
    """Whole numbers of any library are integers, and an integer is a number."""
    if isinstance(value, bool):
        return bool in kinds
    if hasattr(value, "__index__"):
        return bool({int, float} & kinds)
    if hasattr(value, "__float__") and not isinstance(value, str):
        return float in kinds
    return isinstance(value, tuple(kinds))


@contextmanager
def speaking_python() -> Iterator[None]:
    """A block whose errors name parameters of a function, not options of a command."""
    try:
        yield
    except MoeGeomError as error:
        error.message, error.hint = in_python(error.message), in_python(error.hint)
        error.args = (error.message,)
        if notes := getattr(error, "__notes__", None):
            notes[:] = map(in_python, notes)
        raise


def asks(record: type, *names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose options are parameters of ``record``, or those with these names.

    Its signature lists them, it refuses others, and its errors name them as Python does.
    """

    def made(function: Callable[P, R]) -> Callable[P, R]:
        signature = _signature(function, record, names)

        @functools.wraps(function)
        def asked(*arguments: P.args, **options: P.kwargs) -> R:
            with speaking_python():
                if unknown := options.keys() - signature.parameters.keys():
                    raise unknown_name("parameter", min(unknown), signature.parameters)
                return function(*arguments, **options)

        vars(asked)["__signature__"] = signature
        vars(asked)["meanings"] = meanings = _meanings(signature, record)
        asked.__doc__ = _with_parameters(inspect.getdoc(function) or "", signature, meanings)
        return asked

    return made


def _meanings(signature: inspect.Signature, record: type) -> dict[str, str]:
    """What each parameter of a function means that comes from the request."""
    fields = parameters_of(record)
    return {
        name: meaning(fields[name])
        for name, parameter in signature.parameters.items()
        if name in fields and parameter.kind is parameter.KEYWORD_ONLY
    }


def _with_parameters(text: str, signature: inspect.Signature, meanings: Mapping[str, str]) -> str:
    """A docstring with the parameters whose meanings are given."""
    if not meanings:
        return text
    lines = ["", "", "Parameters", "----------"]
    for name, line in meanings.items():
        parameter = signature.parameters[name]
        kind = inspect.formatannotation(parameter.annotation)
        lines += [f"{name} : {kind}, default {parameter.default!r}", f"    {line}"]
    head, title, tail = text.partition("\n\nRaises\n")
    return f"{head}{chr(10).join(lines)}{title}{tail}"


def _signature(
    function: Callable[..., Any], record: type, names: tuple[str, ...]
) -> inspect.Signature:
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    hints = hints_of(record)
    taken = {parameter.name for parameter in own} | {"target", "patterns"}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_of(parameter_field),
            annotation=hints[name],
        )
        for name, parameter_field in ordered_parameters(record).items()
        if name not in taken and (not names or name in names)
    ]
    return signature.replace(parameters=[*own, *options])


def default_of(of: dataclasses.Field[Any]) -> Any:
    """The value of a field where none is given; ``MISSING`` where one must be."""
    return of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
