"""How layers are named: routers in files, and those that are asked for (``0,3-7``)."""

from __future__ import annotations

import re

from moegeom.core.errors import UsageError

#: ``text/31``, and ``text/31/second`` where a layer has several routers.
ROUTER_NAME = re.compile(r"[^/]+/[0-9]{1,9}(/[^/]+)*")

_PART = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")


def parse_layers(text: str) -> frozenset[int]:
    """The layers that a list of numbers and ranges (ends included) names."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f"Layers {text[:60]!r}: {part.strip()[:60]!r} is neither a layer nor a range.",
                "Write numbers and ranges, such as 0,3-7.",
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UsageError(
                f"Layers {text[:60]!r}: the range {part.strip()!r} runs backwards.",
                f"Write {last}-{first}.",
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def format_layers(layers: frozenset[int] | set[int]) -> str:
    """The shortest text that ``parse_layers`` reads as these layers; empty for none."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
