"""``moegeom capacity``: from sizes, or from a checkpoint that has them (docs/capacity.md)."""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import TYPE_CHECKING

from moegeom.core.errors import UsageError
from moegeom.core.files import refuse_unwritable
from moegeom.core.text import number_of
from moegeom.engine.parameters import option_of
from moegeom.research.capacity.layer import MOST, requested_layer
from moegeom.research.capacity.record import Capacity, LayerSizes
from moegeom.research.capacity.request import CapacityRequest
from moegeom.research.capacity.table import write_table

if TYPE_CHECKING:
    from moegeom.pipeline import Watch

#: Splits and dimensions that one run takes.
_MOST_ENTRIES = 100


def capacity(request: CapacityRequest, watch: Watch | None = None) -> Capacity:
    """Counts, bounds and costs of each kind of layer.

    The sizes are those of ``checkpoint``, of which no expert is read, or ``experts``, ``top_k``,
    ``width`` (of one expert) and ``hidden``. The dimension of ``tokens`` is estimated.

    Raises
    ------
    UsageError
        When the options cannot be meant, or ``out`` exists or cannot be written.
    RouterError
        When a checkpoint does not say how wide its experts are, or contradicts itself.
    RecordingError
        When the tokens hold no router inputs, or too few to estimate their dimension.

    Examples
    --------
    >>> import moegeom as mg
    >>> report = mg.capacity(experts=64, top_k=8, width=1024, hidden=2048, data_dims=(2, 4))
    >>> [(at.dims, at.most_cells) for at in report.value.layers[0].at]
    [(2, 43557), (4, 8303321)]
    """
    _check(request)
    if request.checkpoint:
        # what opens checkpoints takes longer to load than counting takes
        from moegeom.research.capacity.opened import of_checkpoint

        report = of_checkpoint(request, watch)
    else:
        report = _of_sizes(request)
    if request.out is not None:
        write_table(request.out, report.layers)
        report = dataclasses.replace(report, written=request.out.name)
    return report


def _of_sizes(request: CapacityRequest) -> Capacity:
    assert request.experts is not None
    assert request.width is not None
    assert request.hidden is not None
    assert request.asked.top_k is not None
    sizes = LayerSizes(
        request.experts,
        request.asked.top_k,
        request.width,
        request.hidden,
        request.shared * request.width,
        request.gated,
    )
    name = f"{number_of(sizes.num_experts, 'expert')}, top-{sizes.top_k}"
    return Capacity(name, (requested_layer(request, sizes),), request.router_dim)


# ------------------------------------------------------------------------------------------ request


def _check(request: CapacityRequest) -> None:
    """Raises UsageError for what cannot be meant, before anything is read."""
    needed = ("experts", "width", "hidden")
    sizes = [name for name in ("experts", "hidden") if getattr(request, name) is not None]
    if request.checkpoint and (sizes or request.shared):
        name = option_of(sizes[0] if sizes else "shared")
        raise UsageError(f"{name} goes without --from: the checkpoint says it.")
    if not request.checkpoint:
        missing = [option_of(name) for name in needed if getattr(request, name) is None]
        missing += [] if request.asked.top_k is not None else [option_of("top_k")]
        if missing:
            raise UsageError(
                f"{', '.join(missing)}: not given; expected every size, or a checkpoint.",
                "For example --experts 64 --top-k 8 --width 1024 --hidden 2048, or --from CKPT.",
            )
        if request.tokens is not None or request.layers is not None:
            name = option_of("tokens" if request.tokens is not None else "layers")
            raise UsageError(f"{name} goes with --from CKPT.")
    for name, most in MOST.items():
        value = getattr(request, name)
        least = 0 if name == "shared" else 1
        if value is not None and not least <= value <= most:
            raise UsageError(f"{option_of(name)} {value}: expected {least} to {most:,}.")
    for name in ("data_dims", "splits"):
        values = getattr(request, name)
        is_known = all(isinstance(v, Integral) and 1 <= int(v) <= 2**15 for v in values)
        if len(values) > _MOST_ENTRIES or not is_known:
            raise UsageError(
                f"{option_of(name)}: expected at most {_MOST_ENTRIES} numbers from 1 to {2**15:,}."
            )
    if any(split > 64 for split in request.splits):
        raise UsageError("--split: expected numbers from 1 to 64.")
    if not request.checkpoint:
        _check_top_k(request)
    _check_out(request)


def _check_top_k(request: CapacityRequest) -> None:
    top_k, experts = request.asked.top_k, request.experts
    assert top_k is not None
    assert experts is not None
    if not 1 <= top_k <= experts:
        raise UsageError(f"--top-k {top_k}: expected 1 to {experts}, the number of experts.")


def _check_out(request: CapacityRequest) -> None:
    out = request.out
    if out is None:
        return
    if out.suffix != ".parquet":
        raise UsageError(f"--out {out}: expected a name that ends in .parquet.")
    if out.exists() and not (request.overwrite and out.is_file()):
        raise UsageError(f"--out {out}: exists already.", "Name another file, or --overwrite.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist.")
    refuse_unwritable(out)
