"""What a scan or a check has to say: a code, how bad, where, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

#: Order in which findings are shown, worst first.
SEVERITY_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One statement about one or several routers.

    ``title`` is the sentence a person reads first, ``detail`` the evidence with its numbers,
    ``fix`` a change that is proved to be neutral, with the proof, and ``next_command`` what to
    type to learn more. ``code`` is empty for a note that explains a null.
    """

    severity: Severity
    code: str
    routers: tuple[str, ...]
    title: str
    detail: str = ""
    next_command: str = ""
    fix: str = ""
