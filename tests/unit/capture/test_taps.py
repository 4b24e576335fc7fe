"""Oracle: hooks on the routers that the tests of the families name, model by model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.core.router import Projection
from moegeom.geometry.rows import normed
from moegeom.recorder.keep import Keep, RowReader
from moegeom.recorder.taps import ModelStore, Place, Tap, find_places
from moegeom.router.load import load_routers
from tests.by_day import by_day
from tests.families.observed import FORWARD, observe
from tests.families.tiny_models import LOADED, OWN_NORM, model_of

#: Families whose module gives back what expert capacity left of the choice.
AFTER_CAPACITY = {"nllb_moe", "switch_transformers"}

RUN = [name for name in LOADED if FORWARD.get(name, True)]

#: By what the router's module, or its block, gives back.
RESULTS = {
    "logits, weights, choices": "olmoe",
    "of its own norm": "gemma4_text",
    "logits alone": "dbrx",
    "a mask": "switch_transformers",
    "masks of two": "nllb_moe",
    "sorted by expert": "jetmoe",
    "weights of all experts": "llama4_text",
    "numbers of experts that copy": "longcat_flash",
    "a table of tokens": "deepseek_v4",
    "a choice that its block makes": "deepseek_v3",
    "weights before choices": "granitemoe",
    "with biases of logits": "gpt_oss",
    "experts in two lots": "ernie4_5_vl_moe",
    "sparsemixer": "phimoe",
    "with rows of shared experts": "inkling_text",
    "without a module of its own": "minimax_m2",
    "in a part of the model": "llava__mixtral",
}


def tapped(name: str) -> tuple[Any, ...]:
    """Places, what their taps deliver while the families' oracle runs the model, and what it saw."""
    model = model_of(name)
    store = ModelStore(model)
    places = find_places(load_routers(store).routers, store)
    delivered: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    handles = [
        handle
        for place in places
        for handle in Tap(place, model, lambda n, *of: delivered.setdefault(n, of)).hooks()
    ]
    try:
        return places, delivered, observe(model, name)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", by_day(RUN, RESULTS))
def test_a_tap_sees_what_the_router_was_given_and_chose(name):
    """And logits on the device are those of the rule, in float64 from the same inputs."""
    places, delivered, observed = tapped(name)
    assert delivered
    for place in (place for place in places if place.router.name in delivered):
        inputs, chosen = delivered[place.router.name]
        router = place.router
        read = [_normed(o.inputs, place, name) for o in observed]
        same = [o for o, y in zip(observed, read, strict=True) if _is_close(y, inputs, name)]
        assert same, f"{router.name} was given something else"
        assert (chosen is None) == (name.partition("__")[0] in AFTER_CAPACITY)
        if chosen is not None:
            assert any(np.array_equal(np.sort(o.chosen), np.sort(chosen)) for o in same)
        parts = RowReader(place, Keep("logits")).of(inputs, None)
        assert parts.values is not None
        exact = inputs.double().numpy() @ router.weight.T.astype(np.float64)
        if router.logit_bias is not None:
            exact = exact + router.logit_bias
        np.testing.assert_allclose(parts.values.numpy(), exact, rtol=1e-4, atol=1e-4)


def _normed(inputs: np.ndarray, place: Place, name: str) -> np.ndarray:
    """What reaches the rows: some routers norm their input themselves."""
    router = place.router
    if name not in OWN_NORM:
        return inputs
    assert router.norm is not None
    assert router.gain is not None
    return normed(inputs, router.norm.kind, router.norm.eps, router.gain)


def _is_close(mine: np.ndarray, theirs: torch.Tensor, name: str) -> bool:
    if mine.shape != tuple(theirs.shape):
        return False
    if name in OWN_NORM:  # normed by two implementations
        return np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return np.array_equal(mine, theirs)


def test_logits_of_a_cosine_router_are_scaled_cosines():
    places, delivered, _ = tapped("olmoe")
    inputs, _ = delivered[places[0].router.name]
    generator = np.random.default_rng(0)
    inner = generator.standard_normal((7, inputs.shape[1]))
    shift, similar = generator.standard_normal(7), generator.standard_normal((5, 7))
    similar /= np.linalg.norm(similar, axis=1, keepdims=True)
    router = dataclasses.replace(
        places[0].router,
        weight=(similar @ inner).astype(np.float32),
        logit_bias=(similar @ shift).astype(np.float32),
        projection=Projection(inner.astype(np.float32), shift.astype(np.float32), scale=3.0),
    )
    place = dataclasses.replace(places[0], router=router)
    parts = RowReader(place, Keep("logits")).of(inputs, None)
    projected = inputs.double().numpy() @ inner.T + shift
    cosine = projected @ similar.T / np.linalg.norm(projected, axis=1, keepdims=True)
    assert parts.values is not None
    np.testing.assert_allclose(parts.values.numpy(), 3.0 * cosine, atol=1e-5)
