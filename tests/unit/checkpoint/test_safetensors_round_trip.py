"""Oracle: the safetensors library writes, torch says what the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moegeom.checkpoint.dtypes import upcast
from moegeom.checkpoint.open import open_checkpoint

_EVERY_16_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
_EVERY_8_BITS = torch.arange(256, dtype=torch.int32).to(torch.uint8)

_TENSORS = {
    "BF16": _EVERY_16_BITS.view(torch.bfloat16),
    "F16": _EVERY_16_BITS.view(torch.float16),
    "F8_E4M3": _EVERY_8_BITS.view(torch.float8_e4m3fn),
    "F8_E5M2": _EVERY_8_BITS.view(torch.float8_e5m2),
    "F32": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "F64": torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", _TENSORS)
def test_every_stored_float_is_the_number_that_torch_reads(dtype, tmp_path):
    save_file({"a": torch.ones(3), "t": _TENSORS[dtype]}, tmp_path / "model.safetensors")
    store = open_checkpoint(tmp_path)
    assert store.info("t").dtype == dtype
    found = upcast(store.read("t"))
    wide = torch.float64 if dtype == "F64" else torch.float32
    np.testing.assert_array_equal(found, _TENSORS[dtype].to(wide).numpy(), strict=True)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_any_shape_survives(shape, tmp_path):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    store = open_checkpoint(tmp_path)
    assert store.info("t").shape == shape
    np.testing.assert_array_equal(store.read("t"), tensor.numpy(), strict=True)


def test_metadata_is_no_tensor(tmp_path):
    save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt", "t": "u"})
    assert list(open_checkpoint(tmp_path).names()) == ["t"]
