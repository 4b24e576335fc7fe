"""Oracle: torch's bfloat16, in its casts, its neighbours and its in-place additions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.geometry.number_formats import UPDATE_STEP, bias_precision, to_bfloat16, ulp_bfloat16


def values() -> np.ndarray:
    """Numbers of every size, ties between neighbours, and numbers next to ties."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal(5000) * np.exp2(random.integers(-130, 120, 5000))
    stored = torch.arange(0, 0x7F80, 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = stored.double().numpy()
    ties = exact + np.array([ulp_bfloat16(float(v)) for v in exact]) / 2
    near = [np.nextafter(ties.astype(np.float32), np.float32(to)) for to in (0, np.inf)]
    whole = np.concatenate([drawn, exact, ties, *near])
    return np.concatenate([whole, -whole])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_torchs(dtype):
    with np.errstate(over="ignore"):
        given = values().astype(dtype)
    expected = torch.from_numpy(given).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(to_bfloat16(given), expected)


def test_the_step_at_a_bfloat16_number_leads_to_the_next():
    bits = torch.arange(1, 0x7F7F, dtype=torch.int32).to(torch.int16)
    number = bits.view(torch.bfloat16).double().numpy()
    following = (bits + 1).view(torch.bfloat16).double().numpy()
    steps = [ulp_bfloat16(float(value)) for value in number]
    np.testing.assert_array_equal(steps, following - number)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.5, 7.0])
def test_lost_updates_are_those_that_torch_loses(offset):
    bias = np.random.default_rng(1).normal(offset, 0.2, 400).astype(np.float32)
    start = torch.from_numpy(bias).to(torch.bfloat16)
    stays = [start + sign * UPDATE_STEP == start for sign in (1, -1)]
    expected = (stays[0] & stays[1]).double().mean().item()
    np.testing.assert_allclose(bias_precision(bias).lost_update_share, expected, rtol=1e-15)


def test_counts_are_those_of_torch_unique():
    bias = np.random.default_rng(2).normal(7.0, 0.05, 256).astype(np.float32)
    found = bias_precision(bias)
    tensor = torch.from_numpy(bias)
    middle = (tensor.double().max() + tensor.double().min()) / 2
    assert found.num_distinct == tensor.unique().numel()
    assert found.num_distinct_bf16 == tensor.bfloat16().unique().numel()
    recentred = (tensor.double() - middle).bfloat16()
    assert found.num_distinct_bf16_recentred == recentred.unique().numel()
    shift = (tensor.bfloat16().double() - tensor.double()).abs().max().item()
    np.testing.assert_equal(found.largest_shift, shift)
