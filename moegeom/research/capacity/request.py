"""What ``moegeom capacity`` is asked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.option import option
from moegeom.engine.request import CHECKPOINT, StudyRequest


@dataclass(frozen=True)
class CapacityRequest(StudyRequest):
    """What was asked for: sizes, or a checkpoint that has them.

    ``width`` is that of one expert, ``hidden`` the length of a router input, ``shared`` how many
    experts run for every token. ``data_dims`` are dimensions of affine sets that the data may lie
    on, ``splits`` into how many parts each expert is cut. ``router_dim`` is the length of the
    vectors that routers with a projection compare. ``out`` is a Parquet file.
    """

    checkpoint: str = option(f"Sizes of a checkpoint: {CHECKPOINT}.", "")
    _: dataclasses.KW_ONLY
    experts: int | None = option("Routed experts.", min=1)
    width: int | None = option("Neurons of one expert.", min=1)
    hidden: int | None = option("Numbers of a router input.", min=1)
    shared: int = option("Experts that run for every token.", 0, min=0)
    gated: bool = option("Experts have a gate (SwiGLU): three matrices.", False)
    data_dims: tuple[int, ...] = option(
        "Dimensions of the data, such as 1,2,5 [default: 1,2,5,10,20,50; of --tokens theirs].", ()
    )
    splits: tuple[int, ...] = option("Cut each expert into so many [default: 1,2,4,8].", ())
    router_dim: int = option("Length of vectors that a projection gives.", 128, min=1)
    out: Path | None = option("Write every count: FILE.parquet.")
