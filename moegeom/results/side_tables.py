"""The small tables beside the measurements: domains and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.row_keys import is_domain, is_whole

Row = Mapping[str, Any]

#: What each variant is, by the name in the variant column.
VARIANTS = {
    "as_stored": "the routers as the checkpoint stores them",
    "random": "rows replaced by random directions of the same length; rule and biases kept",
}


def domain_rows(layers: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each domain with its number of tokens."""
    tokens = {
        row["population"]: row["num_tokens"]
        for row in layers
        if row["variant"] == "as_stored" and is_domain(row["population"])
    }
    return [{"population": name, "num_tokens": number} for name, number in tokens.items()]


def what_if_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure of each what-if at each router; ``parts`` are the facts of routers."""
    return [
        {"router": router, "variant": name, "quantity": quantity, "value": value}
        for router, part in parts.items()
        for name, facts in part.get("what_ifs", {}).items()
        for quantity, value in facts.get("figures", {}).items()
    ]


def variant_rows(
    layers: Sequence[Row], seed: int, described: Mapping[str, Row] = {}
) -> list[dict[str, Any]]:
    """A row for each variant that was measured, with the tokens it was measured on.

    ``described`` says what variants are that are not in ``VARIANTS``.
    """
    tokens = {row["variant"]: row["num_tokens"] for row in layers if is_whole(row["population"])}
    return [
        {
            **described.get(name, {"text": VARIANTS.get(name, "")}),
            "variant": name,
            "seed": seed,
            "num_tokens": number,
        }
        for name, number in tokens.items()
    ]
