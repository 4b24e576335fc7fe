"""MGG207: no router, and no group of its rows, is spread as the config initialises it.

Looked for: weights whose standard deviation is the config's ``initializer_range``, whose mean is 0
and whose kurtosis is that of a normal distribution, each within three standard errors of what as
many normal numbers would show, and whose rows are no more aligned than independent ones: rows of a
trained router share directions. The same of four rows or more among others that are not.

A finding means: this router, or these rows, are as they were drawn, or training has hardly moved
them: a checkpoint of step 0, a router that no gradient reached, experts that were added and never
trained, or rows that a conversion drew anew. Chance makes such a finding of one router in a
thousand or fewer, if its spread has moved by a few standard errors at all: a false alarm needs rows
whose lengths, angles and kurtosis are all those of drawn ones. That nothing is found does not say
that routers were trained: other initialisations are not known here, and a router may move without
learning anything.

What to do: compare with an earlier checkpoint (moegeom diff): a router without a gradient is
identical, or moves by weight decay alone. Early in training it is normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.checks.check import Check, Limit, Limits, Unknown, same_sentence
from moegeom.checks.measured import Measured, Row, listed
from moegeom.core.finding import Finding

#: With fewer numbers a spread tells nothing.
_LEAST = 512


def _too_little(measured: Measured) -> str:
    counts = [facts["num_weights"] for facts in measured.run["initialised"]["routers"]]
    return "" if max(counts, default=0) >= _LEAST else f"routers of fewer than {_LEAST} numbers"


def _judge(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    drawn = measured.run["initialised"]
    rows = {row["router"]: row for row in measured.layers}
    for facts in drawn["routers"]:
        count, spread = facts["num_weights"], facts["std"] / drawn["initializer_range"]
        if count < _LEAST:  # at this router; at all, there is too little to judge
            continue
        errors = (
            (spread - 1.0) * math.sqrt(2.0 * count),
            facts["mean"] / drawn["initializer_range"] * math.sqrt(count),
            facts["kurtosis"] * math.sqrt(count / 24.0),
        )
        most = limits("standard_errors", facts["router"])
        alignment = _alignment(measured, rows.get(facts["router"], {}))
        if max(*map(abs, errors), alignment) > most:
            continue
        yield CHECK.finding(
            facts["router"],
            f"its rows are spread as the config initialises them: standard deviation "
            f"{facts['std']:.4g}, initializer_range {drawn['initializer_range']:g}.",
            f"Of {count:,} normal numbers: standard deviation, mean and kurtosis are "
            f"{errors[0]:+.1f}, {errors[1]:+.1f} and {errors[2]:+.1f} standard errors away, and "
            "its rows share no direction. Was it trained?",
        )
    for row in measured.layers:  # moments of constant rows are not defined, and nobody draws those
        if measured.facts(row["router"]).get("num_non_finite_rows"):
            yield Unknown(row["router"], "the moments of its rows cannot be computed")
    for some in drawn.get("groups", ()):
        yield CHECK.finding(
            some["router"],
            f"{len(some['rows'])} of {some['num_rows']} rows are as the config draws them: expert "
            f"{listed(some['rows'])}.",
            f"Their entries are normal numbers of standard deviation "
            f"{drawn['initializer_range']:g}, and they share no direction with each other or with "
            "the other rows. Were they trained?",
        )


def _alignment(measured: Measured, row: Row) -> float:
    """How far the mean squared cosine of the stored rows is above 1/D, in standard errors.

    Of independent rows it has the standard error 2/(E D), to first order. 0 where it is not known.
    """
    score, facts = row.get("gram_score_raw"), measured.facts(row.get("router", ""))
    if score is None or not facts:
        return 0.0
    hidden, experts = facts["hidden_size"], facts["num_experts"]
    return ((1.0 - score) ** 2 * hidden - 1.0) * experts / 2.0


CHECK = Check(
    "MGG207",
    "rows are spread as the config initialises them",
    "warning",
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
    alike=same_sentence,
    too_little=_too_little,
    severities={"release": "error", "training": "note"},
)
