"""MGI116: every number of config and tensors that decides the routing is in its range.

Looked for: numbers of the config that a rule or a norm takes (eps, factors, caps, counts), and the
largest entry of rows, gains, biases and scales. A legal number is one that a rule can be computed
with; a usual one is near what families have by default. An unusual number is a warning, and an
error under the profile ``release``.

A finding means: engines multiply, divide or cut by a number that no model was trained with: logits
vanish, overflow, or turn round. What is beyond float32, or beyond the dtype that the config names,
is loaded as infinity. The file was edited,
damaged, or written in other units.

What to do: compare the config and the file with their source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moegeom.checks.check import OLDER, Check, Limits, same_sentence
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)
    beyond = measured.run.get("ranges", {}).get("beyond", ())
    for one in sorted(beyond, key=lambda one: one["is_legal"]):
        dtype = one["beyond_dtype"]
        detail = f"Beyond {dtype}: engines load it as infinity." if dtype else ""
        found = CHECK.finding((one["router"],) if one["router"] else (), f"{one['text']}.", detail)
        yield dataclasses.replace(found, severity="warning") if one["is_legal"] else found


CHECK = Check(
    "MGI116",
    "a number is out of its range",
    "error",
    _judge,
    alike=same_sentence,
    too_little=lambda measured: "" if {"ranges", "refused"} & measured.run.keys() else OLDER,
    severities={"release": "error"},
)
