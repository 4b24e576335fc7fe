"""Plug-ins: records at the top of the modules of a package, several to a module where kin."""

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


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """The error for a name that is in no list: nearest spelling and the whole list."""
    listed = sorted(names)
    guess = nearest_name(name, listed)
    return UsageError(f"Unknown {kind} '{name}'.{guess}", f"Known: {', '.join(listed)}.")


def nearest_name(name: str, names: Iterable[str]) -> str:
    """`` Did you mean ...?`` with the known name that is spelled most alike; empty if none is."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]}?" if close else ""


class Rooms(Generic[N]):
    """The records at the top of all modules of one package, several to a module, by their names.

    ``Rooms("reduction", "moegeom.kernels.reductions", Reduction)`` imports that package's modules,
    but for those whose name starts with an underscore, when it is first asked for anything.
    """

    def __init__(self, kind: str, package: str, record: type[N]) -> None:
        self.kind = kind
        self._package = package
        self._record = record
        self._by_name: dict[str, N] | None = None

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

    def in_rooms(self) -> list[N]:
        """Every plug-in, module by module, as it stands there."""
        return [*self._records().values()]

    def _records(self) -> dict[str, N]:
        if self._by_name is None:
            by_name: dict[str, N] = {}
            for place in modules_of(self._package):
                module = importlib.import_module(f"{self._package}.{place}")
                for record in vars(module).values():
                    if not isinstance(record, self._record):
                        continue
                    if by_name.setdefault(record.name, record) is not record:
                        raise InternalError(
                            f"{module.__name__} defines a {self.kind} named '{record.name}', "
                            f"which another module of {self._package} does too."
                        )
            self._by_name = by_name
        return self._by_name


def modules_of(package: str) -> list[str]:
    """Names of the modules of a package, sorted, without those that start with an underscore."""
    folder = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(folder))
    return sorted(name for name in names if not name.startswith("_"))
