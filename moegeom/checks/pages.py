"""The page of a check: its own docstring, with its limits."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass

from moegeom.checks.check import CHECKS, Check
from moegeom.core.errors import InternalError
from moegeom.core.registry import unknown_name

#: Sections of the docstring of a check, in this order.
SECTIONS = ("Looked for", "A finding means", "What to do")


@dataclass(frozen=True)
class Page:
    """A check in words. ``statement`` is what holds when it passes."""

    check: Check
    statement: str
    sections: dict[str, str]


def page_of(check: Check) -> Page:
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


def find_check(code: str) -> Check:
    """The check with this code; UsageError with the nearest one."""
    by_code = {check.code: check for check in CHECKS.all()}
    if code.upper() not in by_code:
        raise unknown_name("code", code, by_code)
    return by_code[code.upper()]


def all_pages() -> list[Page]:
    """Every page, in the order of codes."""
    return [page_of(check) for check in sorted(CHECKS.all(), key=lambda check: check.code)]
