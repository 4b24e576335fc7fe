"""The page of a check: its own docstring, with its limits."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moegeom.checks.check import CHECKS, Statement
from moegeom.core.errors import InternalError
from moegeom.core.registry import unknown_name

#: Sections of the docstring of a check, in this order.
SECTIONS = ("Looked for", "A finding means", "What to do")


@dataclass(frozen=True)
class Page:
    """A check in words. ``statement`` is what holds when it passes."""

    check: Statement[Any]
    statement: str
    sections: dict[str, str]


def page_of(check: Statement[Any]) -> Page:
    """The page of a check, from the docstring of its file."""
    module = sys.modules[check.judge.__module__]
    first, _, rest = (inspect.getdoc(module) or "").partition("\n\n")
    code, _, statement = first.partition(": ")
    parts = re.split(rf"(?:^|\n\n)({'|'.join(SECTIONS)}): ", rest)
    sections = {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    if code != check.code or tuple(sections) != SECTIONS:
        raise InternalError(f"{module.__name__}: its docstring is no page of {check.code}.")
    return Page(check, statement, sections)


def find_check(code: str, others: Iterable[Statement[Any]] = ()) -> Statement[Any]:
    """The check with this code, of one checkpoint or among ``others``; else UsageError."""
    by_code = {check.code: check for check in (*CHECKS.all(), *others)}
    if code.upper() not in by_code:
        raise unknown_name("code", code, by_code)
    return by_code[code.upper()]


def all_pages(others: Iterable[Statement[Any]] = ()) -> list[Page]:
    """Every page, with those of ``others``, in the order of codes."""
    checks = sorted((*CHECKS.all(), *others), key=lambda check: check.code)
    return [page_of(check) for check in checks]
