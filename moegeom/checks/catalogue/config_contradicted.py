"""MGI105: config and tensors agree.

Looked for: numbers of experts, groups, chosen experts and layers, and shapes of routers, biases and
gains, in the config and in the tensors.

A finding means: the config comes from another revision, a slice of a sharded save was taken for the
whole tensor, or layers were lost on the way. Whatever loads the model anyway routes by one of the
two.

What to do: compare with the source of the checkpoint; for a sharded save, join the slices with the
tool that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import number_of


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)
    checkpoint = measured.run.get("checkpoint", {})
    surprises = checkpoint.get("layer_notes", ())
    if surprises:
        found, expected = checkpoint.get("num_routers"), checkpoint.get("num_expected")
        yield CHECK.finding(
            (),
            f"{number_of(found, 'router was', 'routers were')} found where {expected} are "
            "expected.",
            f"{'; '.join(surprises)}.",
        )


CHECK = Check("MGI105", "config and tensors contradict each other", "error", _judge)
