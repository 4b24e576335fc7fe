"""MGI106: what every tensor beside a router means is known.

Looked for: tensors in the router's own module that its family does not have, dtypes that are no
floats, and scales whose shape fits no known storage.

A finding means: the weight may have to be multiplied by something before it is a weight. Read
without it, every figure about this router would be wrong, so nothing is read at all.

What to do: check the original weights, or a checkpoint whose routers were left alone. Quantisers
have lists of modules to skip; routers belong there.
"""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.check import Check, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    yield from CHECK.refused(measured)


CHECK = Check("MGI106", "the storage of a router is not known", "error", _judge)
