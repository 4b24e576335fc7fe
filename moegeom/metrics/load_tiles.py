"""MaxVio per batch: how uneven the load is within 1024 consecutive tokens, on average.

Training logs MaxVio per batch, max_e c_e / m - 1 over one batch, averaged over batches; over a
whole set of tokens (``max_vio_global``) imbalances of single batches even out, so the two must not
be compared. Here a batch is a tile of 1024 tokens in the order of the recording; tiles with fewer
than 512 are left out. There is no standard error: a tile holds several documents. Even
random routing shows sqrt(2 log E (1 - k/E) / m) or so, m = 1024 k / E.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegeom.core.metric import Column, Metric, RouterFacts, Values


def _finish(reductions: Mapping[str, Any], facts: RouterFacts) -> Values:
    tiles, total = reductions["tile_load"]
    if not tiles:
        return {"layers": {}}
    vio = total / tiles * facts.router.num_experts - 1.0
    return {"layers": {"num_tiles": tiles, "max_vio_tile_mean": vio}}


METRIC = Metric(
    name="load_tiles",
    version=1,
    text="MaxVio of tiles of 1024 consecutive tokens, as training logs it per batch.",
    scope="router",
    needs=("tile_load",),
    columns={
        "layers": (
            Column("num_tiles", "tiles of 1024 tokens (at least 512)", "tiles", "int"),
            Column(
                "max_vio_tile_mean",
                "mean over tiles of the largest load over the fair share, minus 1",
                formula="max_vio_tile",
            ),
        )
    },
    finish=_finish,
    invariances=("expert_relabelling",),
)
