"""verl and AReaL: ``routed_experts`` of a batch, (sequences, padded length, layers, k), and a mask.

The batch of a ``DataProto``, or a trajectory of AReaL, saved as arrays (npz, safetensors, or a
dictionary in a file of ``torch.save``): ``routed_experts``, ``attention_mask``, ``input_ids``.
verl pads prompts on the left, and rows of padding, of the last token and of tool outputs are
zeros. AReaL repeats the row before a row that is missing, and says in ``r3_routing_valid`` which
sequences it had to fill so.
"""

from __future__ import annotations

from pathlib import Path

from moegeom.tokens.traces.dialect import Dialect
from moegeom.tokens.traces.dialects._batch_arrays import (
    IDS,
    batch_arrays,
    holds_ids,
    refuse_other_shape,
)
from moegeom.tokens.traces.trace import RequestTrace, Trace

_MASK, _TOKENS, _VALID = "attention_mask", "input_ids", "r3_routing_valid"


def recognises(path: Path) -> bool:
    """True for arrays in which one of four dimensions is called ``routed_experts``, and a mask."""
    return holds_ids(path, _MASK)


def read(path: Path) -> Trace:
    """Every sequence of the batch, with its mask if there is one; invalid ones are counted."""
    arrays = batch_arrays(path, (_MASK, _TOKENS, _VALID))
    ids, mask, tokens = arrays[IDS], arrays.get(_MASK), arrays.get(_TOKENS)
    for name, expected in (
        (_MASK, ids.shape[:2]),
        (_TOKENS, ids.shape[:2]),
        (_VALID, ids.shape[:1]),
    ):
        refuse_other_shape(path, arrays, name, expected)
    if tokens is not None and mask is None:
        # padded token ids without a mask say nothing about which are tokens
        tokens = None
    valid = arrays.get(_VALID)
    kept = [n for n in range(len(ids)) if valid is None or valid[n]]
    filled = len(ids) - len(kept)
    return Trace(
        path.name,
        "verl or AReaL",
        tuple(
            RequestTrace(
                str(number),
                ids[number],
                token_ids=None if tokens is None else tokens[number],
                mask=None if mask is None else mask[number] != 0,
            )
            for number in kept
        ),
        notes=(f"sequences whose rows the trainer filled up, left out: {filled:,}",)
        if filled
        else (),
    )


DIALECT = Dialect(
    name="verl",
    versions="verl 0.9.1; AReaL PR 1496 as of 2026-07",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts); areal/engine/r3 "
    "preprocess.py (preprocess_routed_experts_batch)",
    recognises=recognises,
    read=read,
)
