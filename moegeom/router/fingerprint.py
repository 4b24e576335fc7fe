"""A fingerprint of routers that does not depend on how the files are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Shaped

from moegeom.checkpoint.store import TensorInfo


def tensor_digest(info: TensorInfo, values: Shaped[np.ndarray, "*shape"]) -> str:
    """BLAKE2b-256, in hex, of a tensor's name, dtype, shape and bytes as stored.

    Releases the interpreter lock. On processors without instructions for SHA-256 it is faster.
    """
    head = f"{info.name}\0{info.dtype}\0{','.join(map(str, info.shape))}\0"
    digest = hashlib.blake2b(head.encode(), digest_size=32)
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def router_fingerprint(digests: Iterable[str]) -> str:
    """``blake2b:`` and the hash of all digests, in any order: routers, biases, scales and gains."""
    joined = "".join(sorted(digests)).encode()
    return "blake2b:" + hashlib.blake2b(joined, digest_size=32).hexdigest()
