"""Columns of ``layers`` that are linear in another: a factor of the router, and an offset.

People know the same figure under several names. A scan writes one of them; whoever reads a table
through moegeom is given the others too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: ``run["routers"][i]``: what run.json says of a router.
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Derived:
    """``factor(facts) * column + plus(facts)``; not known where a factor is not finite.

    ``formula`` is a key of docs/formulas.md.
    """

    column: str
    factor: Callable[[Facts], float]
    text: str
    formula: str
    unit: str = "1"
    plus: Callable[[Facts], float] = lambda facts: 0.0

    def of(self, value: float | None, facts: Facts) -> float | None:
        """The value, computed from that of ``column``."""
        return self._scaled(value, facts, self.plus(facts))

    def error_of(self, error: float | None, facts: Facts) -> float | None:
        """The standard error, computed from that of ``column``."""
        scaled = self._scaled(error, facts, 0.0)
        return None if scaled is None else abs(scaled)

    def _scaled(self, value: float | None, facts: Facts, plus: float) -> float | None:
        factor = self.factor(facts)
        return None if value is None or not math.isfinite(factor) else factor * value + plus


def _log_experts(facts: Facts) -> float:
    return math.log(facts["num_experts"]) if facts["num_experts"] > 0 else math.nan


def _per_log_top_k(facts: Facts) -> float:
    return 1.0 / math.log(facts["top_k"]) if facts["top_k"] > 1 else math.nan


def _sample_deviation(facts: Facts) -> float:
    experts = facts["num_experts"]
    return math.sqrt(experts / (experts - 1)) if experts > 1 else math.nan


#: Each by its name: a name that people ask for is a line here.
DERIVED: Mapping[str, Derived] = {
    "boundary_distance_rms_p50": Derived(
        "boundary_distance_p50",
        lambda facts: 1.0 / math.sqrt(max(facts["hidden_size"], 1)),
        "boundary_distance_p50 over the root of the hidden size",
        "boundary_distance",
        "rms of the input",
    ),
    "chosen_entropy_normalised": Derived(
        "chosen_entropy_nats", _per_log_top_k, "chosen_entropy_nats over log k", "routing_entropy"
    ),
    "diversity": Derived(
        "effective_experts",
        lambda facts: 1.0 / max(facts["num_experts"], 1),
        "effective_experts over the number of experts",
        "load_entropy",
    ),
    "kl_to_uniform_nats": Derived(
        "load_entropy_normalised",
        lambda facts: -_log_experts(facts),
        "divergence of the load from even load: log E less load_entropy_nats",
        "kl_to_uniform",
        "nats",
        _log_experts,
    ),
    "load_balancing_loss_hf": Derived(
        "load_balancing_loss_megatron",
        lambda facts: float(facts["top_k"]),
        "E sum f P with f over tokens, this layer alone; k at balance",
        "load_balancing_loss",
    ),
    "load_cv_ddof1": Derived(
        "load_cv_ddof0",
        _sample_deviation,
        "standard deviation over mean of the load (ddof 1)",
        "load_cv",
    ),
    "load_entropy_nats": Derived(
        "load_entropy_normalised",
        _log_experts,
        "entropy of the share of slots per expert",
        "load_entropy",
        "nats",
    ),
    "load_imbalance_global": Derived(
        "max_vio_global",
        lambda facts: 1.0,
        "largest load over the fair share: max_vio_global plus 1",
        "max_vio",
        plus=lambda facts: 1.0,
    ),
    "routing_entropy_nats": Derived(
        "routing_entropy_normalised",
        _log_experts,
        "mean entropy of a token's scores over all experts",
        "routing_entropy",
        "nats",
    ),
}


def with_derived(layers: pa.Table, routers: Sequence[Facts]) -> pa.Table:
    """The table with the derived columns that it does not hold; rows of other routers get none."""
    import pyarrow as pa

    from moegeom.results.schema import fits

    facts = {router["name"]: router for router in routers}
    names = [field.name for field in layers.schema if fits("layers", field)]
    if "router" not in names:
        return layers
    rows = layers["router"].to_pylist()
    for name, derived in DERIVED.items():
        for end, value_of in (("", derived.of), ("_se", derived.error_of)):
            source = derived.column + end
            if source not in names or name + end in layers.column_names:
                continue
            values = [
                value_of(value, facts[router]) if router in facts else None
                for router, value in zip(rows, layers[source].to_pylist(), strict=True)
            ]
            layers = layers.append_column(name + end, pa.array(values, pa.float64()))
    return layers
