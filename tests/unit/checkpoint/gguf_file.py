"""GGUF files, as the package of that name writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

#: The type of each tensor that is stored in blocks.
Types = Mapping[str, gguf.GGMLQuantizationType]


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    types: Types | None = None,
    settings: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """``keys`` are those of the architecture that the writer has a method for."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (keys or {}).items():
        getattr(writer, f"add_{key}")(value)
    settings(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def moe_keys(experts: int, hidden: int, layers: int = 1, eps: float = 1e-5) -> dict[str, Any]:
    """What a file says of a model of so many experts, of which two are chosen."""
    return {
        "expert_count": experts,
        "expert_used_count": 2,
        "embedding_length": hidden,
        "block_count": layers,
        "layer_norm_rms_eps": eps,
    }
