"""Routers and families in words and as plain data; measures nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moegeom.core.router import Router, RouterSet
from moegeom.router.family_file import families, load_family


def describe_router(router: Router) -> dict[str, Any]:
    """Shape, rule and storage of one router."""
    return {
        "router": router.name,
        "experts": router.num_experts,
        "top_k": router.rule.top_k,
        "hidden": router.hidden_size,
        "stored": router.provenance.stored_dtype.lower(),
        "selection": router.rule.selection_score_unit,
        "walls": "straight" if router.rule.is_affine else "curved",
        "finite": bool(np.isfinite(router.weight).all()),
        "tensor": router.provenance.tensors[0],
        "file": router.provenance.file,
    }


def describe_routers(found: RouterSet) -> dict[str, Any]:
    """All routers of a checkpoint with totals, as plain data."""
    facts = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name not in ("routers", "skipped")
    }
    return facts | {
        "routers": [describe_router(router) for router in found.routers],
        "skipped": [dataclasses.asdict(skipped) for skipped in found.skipped],
    }


def describe_families() -> list[dict[str, Any]]:
    """Name, model types, rule and source of every family."""
    return [
        {
            "family": family.name,
            "model types": ", ".join(family.model_types),
            "rule": family.text.replace("{num_experts}", "E")
            .replace("{top_k}", "k")
            .replace("{groups}", "keep g of G groups, "),
            "checked against": family.source,
        }
        for family in map(load_family, families())
    ]
