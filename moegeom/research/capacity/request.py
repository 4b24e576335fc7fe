"""What ``moegeom capacity`` is asked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moegeom.engine.request import TokensRequest


@dataclass(frozen=True)
class CapacityRequest(TokensRequest):
    """What was asked for: sizes, or a checkpoint that has them.

    ``width`` is that of one expert, ``hidden`` the length of a router input, ``shared`` how many
    experts run for every token. ``data_dims`` are dimensions of affine sets that the data may lie
    on, ``splits`` into how many parts each expert is cut. ``router_dim`` is the length of the
    vectors that routers with a projection compare. ``out`` is a Parquet file.
    """

    _: dataclasses.KW_ONLY
    experts: int | None = None
    width: int | None = None
    hidden: int | None = None
    shared: int = 0
    data_dims: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()
    gated: bool = False
    router_dim: int = 128
    out: Path | None = None
