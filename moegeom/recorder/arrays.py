"""Tensors of torch as NumPy arrays, without a copy where both can share the memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Shaped

#: Dtypes of torch in the spelling of safetensors.
STORED_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

#: Dtypes that NumPy has only by ml_dtypes: they cross over as integers of the same size.
_AS_INTEGERS: dict[torch.dtype, tuple[torch.dtype, type]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def as_array(tensor: torch.Tensor) -> Shaped[np.ndarray, "*shape"]:
    """The tensor's numbers in its dtype, by DLPack; a tensor of a device is copied to the host."""
    host = tensor.detach().cpu()
    if host.dtype in _AS_INTEGERS:
        integers, scalar = _AS_INTEGERS[host.dtype]
        return np.from_dlpack(host.contiguous().view(integers)).view(scalar)
    return np.from_dlpack(host)
