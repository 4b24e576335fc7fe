"""MGI107: every router has all its parts.

Looked for: the selection bias or logit bias that the family adds, and the norm in front.

A finding means: whatever loads the model anyway invents the missing part, mostly as zeros, and
routes by another rule.

What to do: compare the file with its source; a conversion may have dropped buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)


CHECK = Check("MGI107", "a part of a router is missing", "error", _judge)
