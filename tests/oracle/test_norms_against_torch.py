"""Oracle: torch.nn.functional.rms_norm and layer_norm, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegeom.geometry.rows import normed


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_router_inputs_are_torchs_norms(kind, eps):
    random = np.random.default_rng(1)
    x = (random.standard_normal((30, 40)) + 0.7).astype(np.float32)
    gain = random.standard_normal(40)
    tensor, weight = torch.from_numpy(x).double(), torch.from_numpy(gain)
    if kind == "rms":
        expected = torch.nn.functional.rms_norm(tensor, (40,), weight, eps)
    else:
        expected = torch.nn.functional.layer_norm(tensor, (40,), weight, None, eps)
    found = normed(x, kind, eps, gain)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1.2e-7, atol=1e-12)
