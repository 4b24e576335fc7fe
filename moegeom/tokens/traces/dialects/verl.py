"""verl and AReaL: ``routed_experts`` of a batch, (sequences, padded length, layers, k), and a mask.

The batch of a ``DataProto``, or a trajectory of AReaL, saved as arrays (npz, safetensors, or a
dictionary in a file of ``torch.save``): ``routed_experts``, ``attention_mask``, ``input_ids``.
verl pads prompts on the left, and rows of padding, of the last token and of tool outputs are
zeros. AReaL repeats the row before a row that is missing, and says in ``r3_routing_valid`` which
sequences it had to fill so.
"""

from __future__ import annotations

from pathlib import Path

from moegeom.tokens.traces.dialects._batch_arrays import (
    IDS,
    batch_rows,
    holds_ids,
    ranges_of,
    read_rows,
    refuse_other_shape,
    shape_of,
)
from moegeom.tokens.traces.trace import (
    Dialect,
    Pieces,
    Place,
    RequestTrace,
    Trace,
)

_MASK, _TOKENS, _VALID = "attention_mask", "input_ids", "r3_routing_valid"


def recognises(path: Path) -> bool:
    """True for arrays in which one of four dimensions is called ``routed_experts``, and a mask."""
    return holds_ids(path, _MASK)


def pieces(path: Path, place: Place) -> Pieces:
    """Sequences by pieces."""
    arrays = batch_rows(path, (_TOKENS,), (_MASK, _VALID))
    ids = arrays[IDS]
    for name, num_axes in ((_MASK, 2), (_TOKENS, 2), (_VALID, 1)):
        refuse_other_shape(path, arrays, name, shape_of(ids)[:num_axes])
    if _MASK not in arrays:
        # padded token ids without a mask say nothing about which are tokens
        arrays.pop(_TOKENS, None)
    for start, stop in ranges_of(path, ids, place[0]):
        held = {name: read_rows(rows, start, stop) for name, rows in arrays.items()}
        mask, tokens, valid = (held.get(name) for name in (_MASK, _TOKENS, _VALID))
        kept = [n for n in range(max(stop - start, 0)) if valid is None or valid[n]]
        filled = stop - start - len(kept)
        requests = [
            RequestTrace(
                str(start + number),
                held[IDS][number],
                token_ids=None if tokens is None else tokens[number],
                mask=None if mask is None else mask[number] != 0,
                is_place=True,
            )
            for number in kept
        ]
        notes = (f"sequences whose rows the trainer filled up, left out: {filled:,}",)
        yield (
            Trace(path.name, "verl or AReaL", tuple(requests), notes=notes if filled > 0 else ()),
            (stop, 0) if stop < ids.num_rows else None,
        )


DIALECT = Dialect(
    name="verl",
    versions="verl 0.9.1; AReaL PR 1496 as of 2026-07",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts); areal/engine/r3 "
    "preprocess.py (preprocess_routed_experts_batch)",
    recognises=recognises,
    pieces=pieces,
)
