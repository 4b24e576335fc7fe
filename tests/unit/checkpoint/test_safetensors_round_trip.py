"""Oracle: the safetensors library writes, torch says what the numbers are."""

from __future__ import annotations

import numpy as np
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


def test_every_float_and_shape_is_what_torch_reads_and_metadata_is_no_tensor(tmp_path):
    own = {dtype: tensor.clone() for dtype, tensor in _TENSORS.items()}
    save_file(own, tmp_path / "model.safetensors", {"format": "pt", "F32": "u"})
    store = open_checkpoint(tmp_path)
    assert set(store.names()) == _TENSORS.keys()
    for dtype, tensor in _TENSORS.items():
        assert store.info(dtype).dtype == dtype
        wide = tensor.to(torch.float64 if dtype == "F64" else torch.float32)
        np.testing.assert_array_equal(upcast(store.read(dtype)), wide.numpy(), dtype, strict=True)
    shapes = {str(shape): shape for shape in ((), (0,), (0, 3), (1,), (2, 3, 4))}
    tensors = {n: torch.arange(int(np.prod(s))).reshape(s) for n, s in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    store = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert store.info(name).shape == shapes[name]
        np.testing.assert_array_equal(store.read(name), tensor.numpy(), strict=True)
