"""Which experts and domains drive the change of a router's load between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moegeom.core.populations import ALL, is_domain
from moegeom.core.series import Driver
from moegeom.results.reader import Results

#: Experts named per router.
NUM_EXPERTS = 3


def drivers(first: Results, last: Results) -> Iterator[Driver]:
    r"""Experts and domains of each router with the largest part in the change of the load.

    The squared CV of the load is the mean of (x_e - 1)^2 over experts, x in fair shares: an expert
    contributes the change of its term over the sum of all absolute changes. A domain is shown with
    its own MaxVio at both ends, largest change first; it contributes the change of the squared CV
    of its own load over the sum of the absolute changes of the router's domains.
    """
    before, after = _loads(first), _loads(last)
    for router, loads in after.items():
        old = before.get(router)
        if old is None or len(old) != len(loads):
            continue
        change = (loads - 1.0) ** 2 - (old - 1.0) ** 2
        total = float(np.abs(change).sum())
        if total > 0.0:
            for expert in np.argsort(-np.abs(change), kind="stable")[:NUM_EXPERTS].tolist():
                yield Driver(
                    router,
                    "expert",
                    str(expert),
                    float(old[expert]),
                    float(loads[expert]),
                    float(change[expert]) / total,
                )
    yield from _domains(first, last)


def _loads(results: Results) -> dict[str, np.ndarray]:
    """Loads in fair shares by router, in the order of the experts."""
    found: dict[str, dict[int, float]] = {}
    for row in results.rows("experts"):
        if (row["variant"], row["population"]) == ("as_stored", ALL) and row.get(
            "load"
        ) is not None:
            found.setdefault(row["router"], {})[row["expert"]] = row["load"]
    return {
        router: np.array([loads[expert] for expert in sorted(loads)])
        for router, loads in found.items()
    }


def _domains(first: Results, last: Results) -> Iterator[Driver]:
    old, new = _figures(first), _figures(last)
    both = [key for key in new if key in old]
    change = {key: new[key][1] ** 2 - old[key][1] ** 2 for key in both}
    total: dict[str, float] = {}
    for router, domain in both:
        total[router] = total.get(router, 0.0) + abs(change[router, domain])
    for key in sorted(both, key=lambda key: (-abs(new[key][0] - old[key][0]), key)):
        router, domain = key
        share = change[key] / total[router] if total[router] > 0.0 else None
        yield Driver(router, "domain", domain, old[key][0], new[key][0], share)


def _figures(results: Results) -> Mapping[tuple[str, str], tuple[float, float]]:
    """MaxVio and CV of the load of each domain."""
    rows: list[dict[str, Any]] = results.rows("layers")
    return {
        (row["router"], row["population"].removeprefix("domain=")): (
            row["max_vio_global"],
            row["load_cv_ddof0"],
        )
        for row in rows
        if row["variant"] == "as_stored"
        and is_domain(row["population"])
        and row.get("max_vio_global") is not None
        and row.get("load_cv_ddof0") is not None
    }
