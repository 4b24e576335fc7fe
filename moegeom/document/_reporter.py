"""What a reporter is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moegeom.core.registry import Registry
from moegeom.results.reader import Results

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """How to show: columns of the screen, colours, whether every layer gets a line, and whether
    the output can show no more than ASCII.
    """

    width: int = 100
    colours: bool = False
    all_layers: bool = False
    is_ascii: bool = False


@dataclass(frozen=True)
class Reporter(Generic[T]):
    """``render`` turns what was found into the text that goes to stdout."""

    name: str
    render: Callable[[T, View], str]


#: Reporters of results by file name.
REPORTERS: Registry[Reporter[Results]] = Registry(
    "format", "moegeom.document.reporters", "REPORTER", Reporter
)
