"""Oracle: torch.topk, wherever no two scores are equal (it promises nothing about ties)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.geometry.selection import margin, top_k


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("experts", "k"), [(2, 1), (5, 5), (64, 8), (256, 8), (17, 16)])
def test_top_k_is_torchs(experts, k, dtype):
    random = np.random.default_rng([experts, k])
    z = random.standard_normal((300, experts)).astype(dtype)
    np.testing.assert_array_equal(np.diff(np.sort(z, axis=1)) == 0, False)
    values, index = torch.topk(torch.from_numpy(z), k, dim=1)
    np.testing.assert_array_equal(top_k(z, k), index.numpy())
    np.testing.assert_array_equal(np.take_along_axis(z, top_k(z, k), axis=1), values.numpy())


@pytest.mark.parametrize(("experts", "k"), [(2, 1), (64, 8), (17, 16)])
def test_the_margin_is_the_difference_of_two_of_torchs_values(experts, k):
    z = np.random.default_rng(experts).standard_normal((300, experts)).astype(np.float32)
    values = torch.topk(torch.from_numpy(z).double(), k + 1, dim=1).values.numpy()
    np.testing.assert_array_equal(margin(z, k), values[:, k - 1] - values[:, k])
