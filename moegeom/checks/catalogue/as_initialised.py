"""MGG207: no router is spread as the config initialises it.

Looked for: weights whose standard deviation is the config's ``initializer_range``, whose mean is 0
and whose kurtosis is that of a normal distribution, each within three standard errors of what as
many normal numbers would show.

A finding means: this router is as it was drawn, or training has hardly moved it: a checkpoint of
step 0, a router that no gradient reached, or one that a conversion drew anew. Chance makes such a
finding of one router in a thousand or fewer, if its spread has moved by a few standard errors at
all. That nothing is found does not say that routers were trained: other initialisations are not
known here, and a router may move without learning anything.

What to do: compare with an earlier checkpoint (moegeom diff): a router without a gradient is
identical, or moves by weight decay alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding

#: With fewer numbers a spread tells nothing.
_LEAST = 512


def _too_little(measured: Measured) -> str:
    counts = [facts["num_weights"] for facts in measured.run["initialised"]["routers"]]
    return "" if max(counts, default=0) >= _LEAST else f"routers of fewer than {_LEAST} numbers"


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding]:
    drawn = measured.run["initialised"]
    for facts in drawn["routers"]:
        count, spread = facts["num_weights"], facts["std"] / drawn["initializer_range"]
        if count < _LEAST:  # at this router; at all, there is too little to judge
            continue
        errors = (
            (spread - 1.0) * math.sqrt(2.0 * count),
            facts["mean"] / drawn["initializer_range"] * math.sqrt(count),
            facts["kurtosis"] * math.sqrt(count / 24.0),
        )
        if max(map(abs, errors)) > limits("standard_errors", facts["router"]):
            continue
        yield CHECK.finding(
            facts["router"],
            f"its rows are spread as the config initialises them: standard deviation "
            f"{facts['std']:.4g}, initializer_range {drawn['initializer_range']:g}.",
            f"Of {count:,} normal numbers: standard deviation, mean and kurtosis are "
            f"{errors[0]:+.1f}, {errors[1]:+.1f} and {errors[2]:+.1f} standard errors away. Was it "
            "trained?",
        )


CHECK = Check(
    "MGG207",
    "a router is spread as the config initialises it",
    "note",
    _judge,
    limits=(
        Limit(
            "standard_errors",
            3.0,
            "largest distance from what normal numbers would show",
            basis="definition",
        ),
    ),
    facts="initialised",
    absent="the config has no initializer_range",
    too_little=_too_little,
    severities={"release": "error", "training": "note"},
)
