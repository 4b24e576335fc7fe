"""A fingerprint of routers that does not depend on how the files are cut.

It tells checkpoints apart that differ by training, rounding or damage; it is no defence against
somebody who builds two checkpoints with equal fingerprints on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from jaxtyping import Shaped

from moegeom.checkpoint.store import TensorInfo
from moegeom.router.plain_names import plain_name, without_model


def tensor_digest(info: TensorInfo, values: Shaped[np.ndarray, "*shape"]) -> str:
    """XXH128, in hex, of a tensor's name, dtype, shape and bytes as stored.

    The name counts without wrappers and with one ``model.`` in front, however many it has: that of
    a model in a dictionary ``{"model": ...}`` is that of the model.
    Runs at the speed of memory, where SHA-256 would take longer than reading the routers.
    """
    name = "model." + without_model(plain_name(info.name))
    head = f"{name}\0{info.dtype}\0{','.join(map(str, info.shape))}\0"
    digest = xxhash.xxh3_128(head.encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def router_fingerprint(digests: Iterable[str]) -> str:
    """``xxh128:`` and the hash of all digests, in any order: routers, biases, scales and gains."""
    return "xxh128:" + xxhash.xxh3_128("".join(sorted(digests)).encode()).hexdigest()
