"""Incidents of revisions: one router of another checkpoint among the others."""

from __future__ import annotations

from collections.abc import Callable

from tests.museum.checkpoint import Checkpoint, name_of
from tests.museum.exhibit_renumbering import olmoe
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import deep_model, trained

_LAYER = ("text/1",)


def _earlier(step: int) -> Callable[[], Checkpoint]:
    """Layer 1 with the router of an earlier step of the same training."""
    name = name_of("weight", 1)
    return lambda: olmoe().changed({name: trained(f"olmoe-balanced/step_{step}").tensors[name]})


ROUTER_OF_ANOTHER_STEP = Incident(
    "router_of_another_step",
    (),
    "The router of one layer was taken from an earlier checkpoint of the same training.",
    "MGG401",
    (
        Case("layer 1 of step 1000 in step 1500", _earlier(1000), ("MGG401",), _LAYER),
        Case("of step 300", _earlier(300), ("MGG401",), _LAYER),
        Case("of step 100", _earlier(100), ("MGG401",), _LAYER),
    ),
    (Case("step 1500 itself", olmoe),),
    olmoe,
)


def _scaled_layer(factor: float) -> Callable[[], Checkpoint]:
    return lambda: deep_model().edited("weight", lambda w, _: factor * w, (5,))


ROUTER_OF_ANOTHER_REVISION = Incident(
    "router_of_another_revision",
    (),
    "The same without a baseline: a router of another revision, with rows of another length, among "
    "twelve layers that change smoothly with depth.",
    "MGG206",
    (
        Case("rows 1.2 times as long", _scaled_layer(1.2)),
        Case("1.6 times", _scaled_layer(1.6), ("MGG206",), ("text/5",)),
        Case("3 times", _scaled_layer(3.0), ("MGG206",), ("text/5",)),
    ),
    (Case("all layers of one revision", deep_model),),
)

INCIDENTS = (ROUTER_OF_ANOTHER_STEP, ROUTER_OF_ANOTHER_REVISION)
