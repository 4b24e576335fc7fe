"""A fingerprint of routers that does not depend on how the files are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.store import TensorInfo


def tensor_digest(info: TensorInfo, values: Shaped[np.ndarray, "*shape"]) -> str:
    """SHA-256, in hex, of a tensor's name, dtype, shape and bytes as stored."""
    head = f"{info.name}\0{info.dtype}\0{','.join(map(str, info.shape))}\0"
    digest = hashlib.sha256(head.encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def router_fingerprint(digests: Iterable[str]) -> str:
    """``sha256:`` and the hash of all digests, in any order: routers, biases, scales and gains."""
    return "sha256:" + hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
