"""Oracles: a map of logits taken in float32 by numpy and torch, the steps in several orders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moegeom.core.router import LogitMap
from moegeom.geometry.number_formats import map_gap
from moegeom.geometry.selection import mapped_logits

MAPS = (
    LogitMap(1.0, 30.0),
    LogitMap(0.18, 5.0),
    LogitMap(3.0, 0.7),
    LogitMap(2.0**-20, 2.0**-30),
    LogitMap(0.18, np.inf),
)


def _of_numpy(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    scaled = z * np.float32(multiplier)
    return scaled if np.isinf(cap) else np.tanh(scaled / np.float32(cap)) * np.float32(cap)


def _of_one_constant(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    if np.isinf(cap):
        return z / np.float32(1.0 / multiplier)
    return np.float32(cap) * np.tanh(z * np.float32(multiplier / cap))


def _of_torch(z: np.ndarray, multiplier: float, cap: float) -> np.ndarray:
    scaled = torch.from_numpy(z) * multiplier
    return (scaled if np.isinf(cap) else torch.tanh(scaled / cap) * cap).numpy()


ENGINES: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "numpy": _of_numpy,
    "numpy, constants joined": _of_one_constant,
    "torch": _of_torch,
}


def near_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Logits of every size, each with one that is a few float32 numbers below."""
    random = np.random.default_rng(11)
    sizes = 2.0 ** np.concatenate([random.uniform(-40.0, 7.0, 60_000), np.full(20_000, -140.0)])
    low = (random.standard_normal(80_000) * sizes).astype(np.float32)
    steps = random.integers(1, 80, len(low)).astype(np.float32)
    return low + steps * np.spacing(np.abs(low)), low


@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_logits_whose_images_are_a_gap_apart_keep_their_order(engine, logit_map):
    """And there are logits that do not: a gap of nothing would keep too few apart."""
    high, low = near_pairs()
    one, other = (mapped_logits(z.astype(np.float64), logit_map) for z in (high, low))
    found = [ENGINES[engine](z, logit_map.multiplier, logit_map.soft_cap) for z in (high, low)]
    is_apart = one - other > map_gap(one, other, logit_map, "float32")
    is_kept = found[0] > found[1]
    assert is_kept[is_apart].all()
    assert is_apart.any()
    assert not is_kept[one > other].all()
