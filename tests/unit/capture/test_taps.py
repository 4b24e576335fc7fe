"""Oracle: hooks on the routers that the tests of the families name, model by model."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moegeom.core.router import Projection
from moegeom.geometry.rows import normed
from moegeom.recorder.keep import Keep
from moegeom.recorder.model_store import ModelStore
from moegeom.recorder.reading import KeptParts
from moegeom.recorder.taps import Place, Tap, find_places
from moegeom.router.load import load_routers
from tests.families.observed import FORWARD, observe
from tests.families.test_families_against_transformers import LOADED, OWN_NORM, model_of

#: Families whose module gives back what expert capacity left of the choice.
AFTER_CAPACITY = {"nllb_moe", "switch_transformers"}

RUN = [name for name in LOADED if FORWARD.get(name, True)]


@cache
def tapped(name: str) -> tuple[Any, dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]]]:
    """What the taps deliver while the families' oracle runs the model, and what that one saw."""
    model = model_of(name)
    store = ModelStore(model)
    places = find_places(load_routers(store).routers, store)
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]] = defaultdict(list)
    handles = [
        handle
        for place in places
        for handle in Tap(place, model, lambda n, i, c: seen[n].append((i, c))).hooks()
    ]
    try:
        observed = observe(model, name)
    finally:
        for handle in handles:
            handle.remove()
    return (places, observed), seen


@pytest.mark.parametrize("name", RUN)
def test_a_tap_sees_what_the_router_was_given_and_chose(name: str) -> None:
    (places, observed), seen = tapped(name)
    found = 0
    for place in places:
        for inputs, chosen in seen[place.router.name][:1]:
            given = [_normed(o.inputs, place, name) for o in observed]
            same = [o for o, y in zip(observed, given, strict=True) if _is_close(y, inputs, name)]
            assert same, f"{place.router.name} was given something else"
            if name.partition("__")[0] in AFTER_CAPACITY:
                assert chosen is None
            else:
                assert chosen is not None
                assert any(np.array_equal(np.sort(o.chosen), np.sort(chosen)) for o in same)
            found += 1
    assert found >= 1


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


@pytest.mark.parametrize("name", RUN)
def test_logits_on_the_device_are_those_of_the_rule(name: str) -> None:
    """In float64 from the same inputs."""
    (places, _), seen = tapped(name)
    for place in places:
        for inputs, _ in seen[place.router.name][:1]:
            kept = KeptParts(place, Keep("logits")).of(inputs, None)
            assert kept.values is not None
            exact = inputs.double().numpy() @ place.router.weight.T.astype(np.float64)
            if place.router.logit_bias is not None:
                exact = exact + place.router.logit_bias
            np.testing.assert_allclose(kept.values.numpy(), exact, rtol=1e-4, atol=1e-4)


def test_logits_of_a_cosine_router_are_scaled_cosines() -> None:
    (places, _), seen = tapped("olmoe")
    inputs = seen[places[0].router.name][0][0]
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
    kept = KeptParts(place, Keep("logits")).of(inputs, None)
    projected = inputs.double().numpy() @ inner.T + shift
    cosine = projected @ similar.T / np.linalg.norm(projected, axis=1, keepdims=True)
    assert kept.values is not None
    np.testing.assert_allclose(kept.values.numpy(), 3.0 * cosine, atol=1e-5)
