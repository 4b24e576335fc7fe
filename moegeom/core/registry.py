"""Plug-ins: listed by file name and imported only when used, or several to a file."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from inspect import getdoc
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from moegeom.core.errors import InternalError, UsageError


class Named(Protocol):
    """A record that says its own name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=Named)
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def record_of_function(
    record: Callable[Concatenate[str, str, F, P], T],
) -> Callable[P, Callable[[F], T]]:
    """The decorator that makes a record of a function: of its name, its docstring, and itself.

    Those are the first three fields of ``record``; the decorator takes the others.
    """

    def with_fields(*args: P.args, **fields: P.kwargs) -> Callable[[F], T]:
        def named(function: F) -> T:
            return record(function.__name__, getdoc(function) or "", function, *args, **fields)

        return named

    return with_fields


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is in no list: nearest spelling and the whole list."""
    listed = sorted(known)
    guess = nearest_name(name, listed)
    return UsageError(f"Unknown {kind} '{name}'.{guess}", f"Known: {', '.join(listed)}.")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?`` with the known name that is spelled most alike; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


class Registry(Generic[T]):
    """The modules of one package, each defining one record under one attribute name.

    ``Registry("metric", "moegeom.metrics", "METRIC", Metric)`` finds ``moegeom/metrics/load.py``
    under the name ``load`` without importing it; ``registry["load"]`` imports it and returns its
    ``METRIC``. A module whose name starts with an underscore is no plug-in.
    """

    def __init__(self, kind: str, package: str, attribute: str, record: type[T]) -> None:
        self.kind = kind
        self._package = package
        self._attribute = attribute
        self._record = record
        self._names: list[str] | None = None
        self._imported: dict[str, T] = {}

    def names(self) -> list[str]:
        """Names of all plug-ins, sorted; imports none of them. The folder is listed once."""
        if self._names is None:
            self._names = _modules_of(self._package)
        return list(self._names)

    def __getitem__(self, name: str) -> T:
        if name in self._imported:
            return self._imported[name]
        if name not in self.names():
            raise unknown_name(self.kind, name, self.names())
        module = importlib.import_module(f"{self._package}.{name}")
        record = getattr(module, self._attribute, None)
        if not isinstance(record, self._record):
            raise InternalError(
                f"{module.__name__} must define {self._attribute} as a {self._record.__name__}, "
                f"found {type(record).__name__}."
            )
        return self._imported.setdefault(name, record)

    def all(self) -> list[T]:
        """Every plug-in, imported, in the order of names."""
        return [self[name] for name in self.names()]


class Rooms(Generic[N]):
    """The records at the top of all modules of one package, several to a module, by their names.

    ``Rooms("reduction", "moegeom.kernels.reductions", Reduction)`` imports that package's modules,
    but for those whose name starts with an underscore, when it is first asked for anything.
    """

    def __init__(self, kind: str, package: str, record: type[N]) -> None:
        self.kind = kind
        self._package = package
        self._record = record
        self._found: dict[str, N] | None = None

    def names(self) -> list[str]:
        """Names of all plug-ins, sorted."""
        return sorted(self._records())

    def __getitem__(self, name: str) -> N:
        records = self._records()
        if name not in records:
            raise unknown_name(self.kind, name, records)
        return records[name]

    def all(self) -> list[N]:
        """Every plug-in in the order of names."""
        return [self[name] for name in self.names()]

    def _records(self) -> dict[str, N]:
        if self._found is None:
            found: dict[str, N] = {}
            for place in _modules_of(self._package):
                module = importlib.import_module(f"{self._package}.{place}")
                for record in vars(module).values():
                    if not isinstance(record, self._record):
                        continue
                    if found.setdefault(record.name, record) is not record:
                        raise InternalError(
                            f"{module.__name__} defines a {self.kind} named '{record.name}', "
                            f"which another module of {self._package} does too."
                        )
            self._found = found
        return self._found


def _modules_of(package: str) -> list[str]:
    """Names of the modules of a package, sorted, without those that start with an underscore."""
    folder = importlib.import_module(package).__path__
    found = (module.name for module in pkgutil.iter_modules(folder))
    return sorted(name for name in found if not name.startswith("_"))
