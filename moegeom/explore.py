"""Functions that explore routers and their data, one for each command.

Parameters and errors are as in `moegeom/api.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.document.report import Report
from moegeom.engine.parameters import asks, request_of
from moegeom.research.attention.record import AttentionRequest
from moegeom.research.capacity.request import CapacityRequest
from moegeom.research.hmoe.record import HmoeRequest
from moegeom.routing_cells.study.request import CellsRequest, parse_view
from moegeom.studies.opened import Checkpoint, asked_request, side
from moegeom.studies.routes.record import RoutesRequest
from moegeom.studies.whatif.record import WhatIfRequest

if TYPE_CHECKING:
    from moegeom.pipeline import Watch
    from moegeom.research.attention.record import Attention
    from moegeom.research.capacity.record import Capacity
    from moegeom.research.hmoe.record import Mixtures
    from moegeom.routing_cells.record import Enumerations
    from moegeom.studies.routes.record import Routes
    from moegeom.studies.whatif.record import WhatIfReport


@asks(WhatIfRequest)
def whatif(
    checkpoint: str | Path | Checkpoint,
    tokens: Any = None,
    *,
    out: str | Path | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Report[WhatIfReport]:
    """What other routers would choose on the same tokens: loads, sets, weight, compute.

    ``what_ifs`` are such as ``"smooth:extra=0.5"``, or several. ``checkpoint`` may be results of an
    earlier call. Results stay in memory, or are kept in the folder ``out``.

    Raises
    ------
    RecordingError
        When the recording does not hold the scores of all experts.
    UsageError
        Without tokens or what-ifs, for one that is not known, and for new ones beside results.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> ckpt, rec = f"{sample}/step_1500", f"{sample}/rec/step_1500"
    >>> found = mg.whatif(ckpt, rec, what_ifs="topk:2", layers=0)
    >>> [(one.name, one.experts_mean) for one in found.value.what_ifs]
    [('topk:2', 2.0)]
    """
    from moegeom.pipeline import results_of
    from moegeom.results.reader import is_results, open_results
    from moegeom.studies.whatif.document import document
    from moegeom.studies.whatif.record import what_if_report_of
    from moegeom.studies.whatif.study import measure_what_ifs, refuse_beside_results

    named = side("checkpoint", checkpoint)
    if is_results(named["checkpoint"]):
        asked = (options.get(name) for name in ("what_ifs", "grid"))
        refuse_beside_results(str(named["checkpoint"]), tokens, *asked)
        return Report(what_if_report_of(open_results(named["checkpoint"])), document)
    request = asked_request(WhatIfRequest, named, tokens, options, out=out)
    return Report(what_if_report_of(results_of(request, watch, measure_what_ifs)), document)


@asks(CellsRequest)
def cells(
    checkpoint: str | Path | Checkpoint = "",
    tokens: Any = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Report[Enumerations]:
    """The routing cells of a slice, exactly; or a proof that one set of experts is a cell or none.

    ``weights`` is a bare matrix instead of a checkpoint, with ``top_k``.

    Raises
    ------
    UsageError
        When the options cannot be meant, or a picture or ``out`` cannot be written.
    RouterRuleError
        When cells of a router with non-linear scores are to be listed.

    Examples
    --------
    >>> import moegeom as mg
    >>> ckpt, rec = (f"sample_ckpts/olmoe-balanced/{name}step_1500" for name in ("", "rec/"))
    >>> found = mg.cells(ckpt, rec, layers=0, subspace="pca:2")
    >>> found.value.routers[0].cells.num_cells > 10
    True
    """
    from moegeom.routing_cells.document import document
    from moegeom.routing_cells.study.study import cells as listed

    view, expert = parse_view(options.pop("view", "cells"))
    options = {"expert": expert, **options, "view": view}
    request = asked_request(CellsRequest, side("checkpoint", checkpoint), tokens, options)
    return Report(listed(request, watch), document)


@asks(CapacityRequest)
def capacity(
    checkpoint: str | Path | Checkpoint = "",
    tokens: Any = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Report[Capacity]:
    """What a router of some size could do at most: cells and regions on data of few dimensions.

    The sizes are those of ``checkpoint``, of which no expert is read, or ``experts``, ``top_k``,
    ``width`` (of one expert) and ``hidden``. The dimension of ``tokens`` is estimated.

    Raises
    ------
    UsageError
        When sizes are missing or cannot be meant, or ``out`` cannot be written.
    RouterError
        When the checkpoint does not say how wide its experts are, or contradicts itself.

    Examples
    --------
    >>> import moegeom as mg
    >>> found = mg.capacity(experts=64, top_k=8, width=1024, hidden=2048, data_dims=(2, 4))
    >>> [(at.dims, at.most_cells) for at in found.value.layers[0].at]
    [(2, 43557), (4, 8303321)]
    """
    from moegeom.research.capacity.document import document
    from moegeom.research.capacity.study import capacity as counted

    request = asked_request(CapacityRequest, side("checkpoint", checkpoint), tokens, options)
    return Report(counted(request, watch), document)


@asks(AttentionRequest)
def attention(
    checkpoint: str | Path | Checkpoint,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Report[Attention]:
    """Gates, sinks and heads of attention layers, from weights alone.

    Raises
    ------
    RouterError
        When a family whose gates or sinks are known has no attention layer in this file.
    UsageError
        When more than 2 GB are to be read without ``yes``, or ``out`` cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> mg.attention("sample_ckpts/olmoe-balanced/step_1500").value.family
    ''
    """
    from moegeom.research.attention.document import document
    from moegeom.research.attention.study import attention as looked_at

    request = asked_request(AttentionRequest, side("checkpoint", checkpoint), None, options)
    return Report(looked_at(request, watch), document)


@asks(RoutesRequest, "dialect")
def routes(files: str | Path | Iterable[str | Path], **options: Any) -> Report[Routes]:
    """What traces of engines and trainers hold, and what is wrong with them, without a checkpoint.

    The value is what was found in each file; its ``exit_code`` is 0 when all are sound, 1 when one
    has defects, 4 when one says too little to judge.

    Raises
    ------
    RecordingError
        When a file is not there, or no trace that can be told.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import moegeom as mg
    >>> ids = np.array([[[0, 2], [1, 3]], [[1, 2], [3, 0]], [[3, 3], [1, 2]]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/routes.npz", request=ids)
    ...     found = mg.routes(f"{folder}/routes.npz").value
    >>> found.exit_code, found.files[0].defects[0].request
    (1, 'request')
    """
    from moegeom.studies.routes.document import document
    from moegeom.studies.routes.study import routes as described

    several = [files] if isinstance(files, str | Path) else files
    request = request_of(RoutesRequest, files=tuple(os.fspath(f) for f in several), **options)
    return Report(described(request), document)


@asks(HmoeRequest)
def hmoe(*, watch: Watch | None = None, **options: Any) -> Report[Mixtures]:
    """What data can tell of the parameters of gated attention, and what descents show of rates.

    ``what`` is "ranks", by where a non-linearity stands, or "rates": the experiment of S2 beside
    its control, which takes ten minutes of a core in full and seconds with ``quick``.

    Raises
    ------
    UsageError
        When the options cannot be meant, and when ``out`` cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> found = mg.hmoe(what="ranks")
    >>> [one.position for one in found.value.ranks if one.beyond == 0]
    ['value', 'sdpa', 'value', 'sdpa']
    """
    from moegeom.research.hmoe.document import document
    from moegeom.research.hmoe.study import hmoe as described

    return Report(described(request_of(HmoeRequest, **options), watch), document)
