"""MGB203: no expert takes several times its fair share.

Looked for: a busiest expert whose load is above several times the fair share by more than chance.

A finding means: this expert is the bottleneck wherever experts run on different devices, and others
are short of tokens. Load holds for the tokens it was measured on.

What to do: follow the expert over the training steps, and look at its row and its domains. The
limit is heuristic.
"""

from __future__ import annotations

from moegeom.checks.catalogue.mean_decides import CHECK as MEAN_DECIDES
from moegeom.checks.catalogue.mean_decides import MOST_PULL
from moegeom.checks.check import Limit
from moegeom.checks.figure import Figure, figure_check
from moegeom.checks.measured import MeanPull
from moegeom.core.finding import MOST_FAIR_SHARES


def _words(figure: Figure) -> tuple[str, str]:
    row = figure.row
    router, expert = row["router"], row["busiest_expert"]
    busiest = {e["expert"]: e for e in figure.measured.experts[router]}[expert]
    domains = figure.measured.domains.get(router, ())
    same = [d for d in domains if d["busiest_expert"] == expert]
    where = f" It leads in {len(same)} of {len(domains)} domains." if len(domains) > 1 else ""
    norm = busiest["row_norm"]  # missing for a row that is not finite
    ratio = norm / row["row_norm_median"] if norm and row["row_norm_median"] else 0.0
    length = f" Its row is {ratio:.1f}x the median length." if ratio else ""
    share = busiest["num_slots"] / row["num_tokens"]
    pull = MeanPull.of(row)
    cause = ""
    if pull is not None and pull.is_above(MOST_PULL):
        cause = f" The mean input decides much of the choice there ({MEAN_DECIDES.code})."
    evidence = f"(limit {figure.limit:.1f}, {figure.basis(1)}).{where}{length}{cause}"
    return (
        f"expert {expert} is chosen by {100 * share:.0f} % of the tokens.",
        f"It gets {figure.value:.1f}x its fair share {evidence}",
    )


def _room(figure: Figure) -> float:
    """The largest load is that of an expert which every token chooses."""
    rows = figure.measured.experts[figure.row["router"]]
    slots = sum(e["num_slots"] for e in rows)
    return len(rows) * figure.row["num_tokens"] / slots - figure.limit


CHECK = figure_check(
    "MGB203",
    "one expert takes several fair shares",
    "max_vio_global",
    # From practice: healthy trained layers stay below 2.
    Limit("fair_shares", MOST_FAIR_SHARES, "largest load of an expert, in fair shares"),
    _words,
    lambda shift: f"an expert {shift:.2f} fair shares above its limit",
    room=_room,
    absent="the tokens say nothing of load",
    offset=1.0,
    extra="--per-token",
)
