"""What trainers store of a step: verl and AReaL, tunix, slime and miles, prime-rl.

verl and AReaL, and tunix, store the arrays of a padded batch by name, in npz, safetensors, or a
dictionary that ``torch.save`` wrote; of them ``routed_experts``, (sequences, padded length, layers,
k), and what says which rows are tokens. They are read by ranges of sequences, so that a file may be
of any size.

verl and AReaL (the batch of a ``DataProto``, or a trajectory) hold ``attention_mask`` and
``input_ids``. verl pads prompts on the left, and rows of padding, of the last token and of tool
outputs are zeros. AReaL repeats the row before a row that is missing, and says in
``r3_routing_valid`` which sequences it had to fill so.

tunix (an ``RLTrainerPayload``) holds ``prompt_ids``, ``prompt_mask``, ``completion_ids`` and
``completion_mask``. Prompts are padded on the left, completions on the right. -1 is written where
no expert was captured: in padding, and for the last token. The mask of a completion may leave out
tokens that are not trained (answers of tools); they have been routed all the same.

slime and miles store with ``--save-debug-rollout-data`` or ``--dump-details``
``{"rollout_id", "samples": [...]}`` in a file of ``torch.save``; a sample holds its ``tokens``
(prompt and response) and ``rollout_routed_experts``, (tokens - 1, layers, k): a tensor in slime, a
NumPy array in miles. Layers without a router are zeros.

prime-rl stores ``rank_<n>.bin`` in the rollouts folder, in msgpack: a list of micro batches, each
an array of fields in a fixed order; of them ``input_ids``, ``position_ids``, ``sequence_lengths``
and ``routed_experts`` (bytes, shape, dtype) are read. A micro batch packs several sequences, whose
positions begin at 0 again; so do those of the padding behind them. There is a row for each token;
rows that were not captured, such as that of the last token, are zeros. A sequence that was cut to
the trainer's length ends with a row of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import MsgspecError, Raw, msgpack

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError, first_line
from moegeom.core.files import open_regular, read_regular, reading
from moegeom.core.limits import LIST_BYTES, TRACE_BYTES
from moegeom.core.shapes import Bool, Int64, Integer
from moegeom.core.text import number_of, quoted
from moegeom.tokens.foreign.arrays import open_tensor_file
from moegeom.tokens.foreign.npy import npz_rows, npz_shapes
from moegeom.tokens.rows import FileRows, Rows, read_rows
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.dialects._text import shaped
from moegeom.tokens.traces.dialects._torch_file import TorchFile, has_keys, open_torch_file
from moegeom.tokens.traces.trace import (
    WITHOUT_IDS,
    Dialect,
    Entry,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    counted_notes,
    in_pieces,
    rows_of_piece,
)

# --------------------------------------------------------------------------------- padded batches

#: What trainers call the ids of a batch.
_IDS = "routed_experts"

_MASK, _TOKENS, _VALID = "attention_mask", "input_ids", "r3_routing_valid"

_PROMPT, _COMPLETION, _SEGMENTS = "prompt_ids", "completion_ids", "segment_ids"
_PROMPT_MASK, _COMPLETION_MASK = "prompt_mask", "completion_mask"

_Arrays = Mapping[str, np.ndarray]

#: The token ids and masks of sequences; None where nothing says them.
_Sequences = tuple[
    Integer[np.ndarray, "sequences tokens"] | None, Bool[np.ndarray, "sequences tokens"] | None
]


def read_verl(path: Path, place: Place) -> Pieces:
    """Sequences by pieces, with their masks if there are any; invalid ones are counted."""
    arrays = _batch_rows(path, (_TOKENS,), (_MASK, _VALID))
    size = _shape_of(arrays[_IDS])[:2]
    _refuse_other_shapes(path, arrays, {_MASK: size, _TOKENS: size, _VALID: size[:1]})

    def sequences(part: _Arrays, start: int) -> _Sequences:
        # padded token ids without a mask say nothing about which are tokens
        return (part.get(_TOKENS), part[_MASK] != 0) if _MASK in part else (None, None)

    return _pieces(path, place, "verl or AReaL", arrays, sequences)


VERL = Dialect(
    name="verl",
    versions="verl 0.9.1; AReaL PR 1496 as of 2026-07",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts); areal/engine/r3 "
    "preprocess.py (preprocess_routed_experts_batch)",
    recognises=lambda path: _holds_ids(path, _MASK),
    pieces=read_verl,
)


def read_tunix(path: Path, place: Place) -> Pieces:
    """Sequences by pieces; those without any captured row stay, for the cleaning."""
    arrays = _batch_rows(path, (_PROMPT, _COMPLETION, _SEGMENTS), (_PROMPT_MASK, _COMPLETION_MASK))
    missing = sorted({_PROMPT, _COMPLETION, _PROMPT_MASK, _COMPLETION_MASK} - set(arrays))
    if missing:
        raise RecordingError(
            f"{path.name}: lacks {', '.join(missing)}; expected them beside {_IDS}.",
            "Save these arrays of the payload too: without them nothing says which rows are "
            "tokens.",
        )
    num, length = _shape_of(arrays[_IDS])[:2]
    width = arrays[_PROMPT].row_shape[0] if len(arrays[_PROMPT].row_shape) == 1 else -1
    shapes = dict.fromkeys((_PROMPT, _PROMPT_MASK), (num, width))
    shapes |= dict.fromkeys((_COMPLETION, _COMPLETION_MASK), (num, length - width))
    _refuse_other_shapes(path, arrays, shapes | {_SEGMENTS: (num, length)})

    def sequences(part: _Arrays, start: int) -> _Sequences:
        for number, row in enumerate(part.get(_SEGMENTS, ()), start=start):
            if len(np.unique(row[row > 0])) > 1:
                raise RecordingError(
                    f"{path.name}: row {number} of {_SEGMENTS} holds several sequences; expected "
                    "one sequence to a row.",
                    "Save payloads before they are packed.",
                )
        # a completion ends with its last token that is trained
        num_trained_from = np.cumsum(part[_COMPLETION_MASK][:, ::-1] != 0, axis=1)[:, ::-1]
        mask = np.concatenate([part[_PROMPT_MASK] != 0, num_trained_from > 0], axis=1)
        return np.concatenate([part[_PROMPT], part[_COMPLETION]], axis=1), mask

    return _pieces(path, place, "tunix", arrays, sequences)


TUNIX = Dialect(
    name="tunix",
    versions="tunix PR 2046 as merged (2026-08-31)",
    source="tunix RLTrainerPayload (routed_experts, UNSET_ROUTED_EXPERT) and its padded batch "
    "assembly",
    recognises=lambda path: _holds_ids(path, _PROMPT, _COMPLETION),
    pieces=read_tunix,
)


def _pieces(
    path: Path,
    place: Place,
    writer: str,
    arrays: Mapping[str, Rows],
    sequences: Callable[[_Arrays, int], _Sequences],
) -> Pieces:
    """The sequences that are valid, by pieces."""
    ids = arrays[_IDS]
    for start, stop in _ranges_of(path, ids, place[0]):
        part = {name: read_rows(rows, start, stop) for name, rows in arrays.items()}
        token_ids, mask = sequences(part, start)
        requests = [
            RequestTrace(
                str(start + number),
                of_sequence,
                token_ids=None if token_ids is None else token_ids[number],
                mask=None if mask is None else mask[number],
                is_place=True,
            )
            for number, of_sequence in enumerate(part[_IDS])
            if _VALID not in part or part[_VALID][number]
        ]
        num_filled = len(part[_IDS]) - len(requests)
        notes = counted_notes({"sequences whose rows the trainer filled up, left out": num_filled})
        yield (
            Trace(path.name, writer, tuple(requests), notes=notes),
            (stop, 0) if stop < ids.num_rows else None,
        )


def _holds_ids(path: Path, *beside: str) -> bool:
    """Whether a file holds such ids, and every array of ``beside``."""
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return len(shapes.get(_IDS) or ()) == 4 and set(beside) <= set(shapes)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return {_IDS, *beside} <= set(open_tensor_file(path).names)
        except RecordingError:
            return False
    return has_keys(path, _IDS, *beside)


def _batch_rows(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    """Those of the arrays ``names`` and ``masks`` that the file holds, and the ids, a sequence to a
    row; ids must be there.

    Raises
    ------
    RecordingError
        When it is none of the three kinds of file, is damaged, or its ids have other than four
        dimensions.
    """
    if path.suffix not in _READERS:
        raise RecordingError(
            f"{path.name}: expected one of {', '.join(_READERS)}.",
            "Save the tensors of the batch: np.savez, safetensors, or torch.save of a dictionary.",
        )
    arrays = _READERS[path.suffix](path, (_IDS, *names), masks)
    ids = arrays.get(_IDS)
    if ids is None or len(ids.row_shape) != 3:
        shape = "none" if ids is None else str(_shape_of(ids))
        raise RecordingError(
            f"{path.name}: {_IDS} has shape {shape}; expected (sequences, tokens, layers, k)."
        )
    return arrays


def _shape_of(rows: Rows) -> tuple[int, ...]:
    """The shape of the whole array."""
    return (rows.num_rows, *rows.row_shape)


def _refuse_other_shapes(
    path: Path, arrays: Mapping[str, Rows], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises RecordingError where an array that is there has another shape than the ids ask for."""
    for name, shape in expected.items():
        if name in arrays and _shape_of(arrays[name]) != shape:
            raise RecordingError(
                f"{path.name}: {name} has shape {_shape_of(arrays[name])}; {_IDS} has {shape}."
            )


def _ranges_of(path: Path, ids: Rows, first: int) -> Iterator[tuple[int, int]]:
    """Ranges of sequences from ``first`` on with some ``PIECE_BYTES`` of ids; one is empty where
    there is none.

    Raises
    ------
    RecordingError
        When one sequence is too large to be held.
    """
    each = ids.width * ids.dtype.itemsize
    if each > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {each:,} bytes of ids of one sequence, more than the {TRACE_BYTES:,} "
            "allowed.",
            "Cut the padding behind the longest sequence.",
        )
    step = rows_of_piece(each)
    for start in range(first, ids.num_rows, step) or (first,):
        yield start, min(start + step, ids.num_rows)


def _safetensors(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    opened = open_tensor_file(path)
    arrays: dict[str, Rows] = {}
    for name in (one for one in (*names, *masks) if one in opened.names):
        info = opened.file.info(name)
        dtype = DTYPES.get(info.dtype)
        if dtype is None or dtype.numpy is None or dtype.numpy.kind not in "iub":
            raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
        num_rows, *row = info.shape or (0,)
        arrays[name] = FileRows(path, info.offset, dtype.numpy, num_rows, tuple(row))
    return arrays


def _torch(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    present = [name for name in (*names, *masks) if name in root]
    return {name: file.rows(root[name], f"{path.name}: {name}") for name in present}


_READERS: Mapping[str, Callable[[Path, Collection[str], Collection[str]], dict[str, Rows]]] = {
    ".npz": npz_rows,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}


# --------------------------------------------------------------------------------- slime and miles

_ROLLOUT_IDS = "rollout_routed_experts"


def read_rollouts(path: Path, place: Place) -> Pieces:
    """Samples by pieces; those without ids are counted."""
    file = open_torch_file(path)
    samples = file.root.get("samples") if isinstance(file.root, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RecordingError(f"{path.name}: holds no list of samples.")

    def entries() -> Iterator[Entry]:
        for number in range(place[0], len(samples)):
            is_missing = samples[number].get(_ROLLOUT_IDS) is None
            requests = [] if is_missing else [_sample(file, number, samples[number])]
            yield (number, 0), requests, {f"samples {WITHOUT_IDS}": is_missing}

    return in_pieces(path.name, "slime or miles", entries())


def _sample(file: TorchFile, number: int, sample: dict[Any, Any]) -> RequestTrace:
    where = f"{file.label}: sample {number}"
    ids = file.array(sample[_ROLLOUT_IDS], f"{where}: {_ROLLOUT_IDS}")
    tokens = sample.get("tokens")
    token_ids = None if tokens is None else file.array(tokens, f"{where}: tokens")
    if ids.ndim != 3 or (token_ids is not None and token_ids.ndim != 1):
        raise RecordingError(
            f"{where}: {_ROLLOUT_IDS} has shape {ids.shape}; expected (tokens - 1, layers, k)."
        )
    num_prompt, num_response = None, sample.get("response_length")
    if token_ids is not None and type(num_response) is int:
        num_prompt = len(token_ids) - num_response if 0 <= num_response <= len(token_ids) else None
    return RequestTrace(str(number), ids, token_ids=token_ids, num_prompt=num_prompt, is_place=True)


SLIME = Dialect(
    name="slime",
    versions="slime 624b824a89 and miles 31f1ca961a (2026-08-21)",
    source="slime/utils/types.py (Sample), slime/ray/rollout.py; PRs slime 715, 810, 1045",
    recognises=lambda path: has_keys(path, "samples", _ROLLOUT_IDS),
    pieces=read_rollouts,
)


# --------------------------------------------------------------------------------------- prime-rl

#: Places of the fields that are read among those of a micro batch.
_INPUTS, _POSITIONS, _LENGTHS, _ROUTED = 0, 4, 5, 10

#: The token that a micro batch is filled up with.
_PAD = 1

#: First bytes of arrays in msgpack: short ones, and those with a length of 2 or 4 bytes.
_ARRAYS = dict.fromkeys(range(0x90, 0xA0), 1) | {0xDC: 3, 0xDD: 5}


def holds_batches(path: Path) -> bool:
    """True for ``rank_<n>.bin`` that begins with an array of arrays of arrays of integers."""
    if not path.match("rank_*.bin") or not path.is_file():
        return False
    with open_regular(path, follows=True) as stream:
        start = stream.read(16)
    for _ in range(3):
        skipped = _ARRAYS.get(start[0]) if start else None
        if skipped is None:
            return False
        start = start[skipped:]
    return bool(start) and (start[0] < 0x80 or 0xCC <= start[0] <= 0xCF)


def read_batches(path: Path) -> Trace:
    """Every sequence of every micro batch; micro batches without routed experts are counted."""
    with reading(path, RecordingError, "Give the files of ranks one by one."):
        raw = read_regular(path, TRACE_BYTES, follows=True)
    batches = _unpacked(raw, list[list[Raw]], path.name)
    requests: list[RequestTrace] = []
    without = padding = 0
    for number, batch in enumerate(batches):
        where = f"{path.name}: micro batch {number}"
        if len(batch) <= _LENGTHS:
            raise RecordingError(
                f"{where}: {number_of(len(batch), 'field')}; expected at least {_LENGTHS + 1}.",
                "Another version of prime-rl wrote it.",
            )
        routed = batch[_ROUTED] if len(batch) > _ROUTED else None
        if routed is None or bytes(routed) == b"\xc0":
            without += 1
        else:
            sequences = list(_sequences(batch, routed, number, where))
            if _is_padding(sequences[-1:]):
                padding += len(sequences.pop().ids)
            requests += sequences
    counts = {
        f"micro batches {WITHOUT_IDS}": without,
        "tokens of padding behind packed sequences, left out": padding,
    }
    return Trace(
        path.name,
        "prime-rl",
        tuple(requests),
        last_is_routed=_only_the_longest_are_cut(requests),
        notes=counted_notes(counts),
    )


def _is_padding(last: Sequence[RequestTrace]) -> bool:
    """Whether the last sequence of a micro batch is what the trainer fills it up with."""
    return any(
        one.token_ids is not None and not one.ids.any() and bool((one.token_ids == _PAD).all())
        for one in last
    )


def _only_the_longest_are_cut(requests: Sequence[RequestTrace]) -> bool:
    """Whether sequences whose last row holds choices have the length of the longest."""
    cut = [len(one.ids) for one in requests if len(one.ids) and one.ids[-1].any()]
    return bool(cut) and min(cut) == max(len(one.ids) for one in requests)


def _unpacked(raw: Any, kind: Any, where: str) -> Any:
    """What msgpack holds, if it is of this kind: nothing is converted, nothing of it is code."""
    try:
        return msgpack.decode(raw, type=kind)
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RecordingError(
            f"{where}: {first_line(error)[:120]}.",
            "Is it whole, and of a version of prime-rl with the same order of fields?",
        ) from None


def _sequences(
    batch: Sequence[Any], routed: Any, number: int, where: str
) -> Iterator[RequestTrace]:
    tokens, positions, lengths = (
        _integers(batch[place], f"{where}: field {place}")
        for place in (_INPUTS, _POSITIONS, _LENGTHS)
    )
    data, shape, dtype = _unpacked(routed, tuple[bytes, list[int], str], f"{where}: routed_experts")
    if dtype not in EXPERT_DTYPES or len(shape) != 3 or not all(0 <= n < 2**40 for n in shape):
        raise RecordingError(
            f"{where}: routed_experts is {quoted(dtype)} of shape {quoted(shape)}; expected "
            f"(tokens, layers, k) of {', '.join(EXPERT_DTYPES)}."
        )
    ids = shaped(data, EXPERT_DTYPES[dtype], shape, where)
    ends = np.cumsum(lengths)
    if not len(tokens) == len(positions) == len(ids) == int(lengths.sum()):
        raise RecordingError(
            f"{where}: {number_of(len(tokens), 'token')}, {len(positions)} positions, "
            f"{number_of(len(ids), 'row')} and sequences of {int(lengths.sum())} tokens; expected "
            "as many of each."
        )
    starts = np.flatnonzero(positions == 0)
    begun = {0, *ends[:-1][lengths[1:] > 0].tolist()} if len(tokens) else set()
    if not begun <= set(starts.tolist()):
        raise RecordingError(
            f"{where}: positions do not begin at 0 where its sequences do.",
            "Positions of several axes (images) do not say where a sequence begins.",
        )
    stops = [*starts[1:].tolist(), len(ids)]
    for part, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=False)):
        yield RequestTrace(
            f"{number}/{part}", ids[start:stop], token_ids=tokens[start:stop], is_place=True
        )


def _integers(raw: Any, where: str) -> Int64[np.ndarray, "numbers"]:
    if memoryview(raw).nbytes > LIST_BYTES:
        raise RecordingError(f"{where}: has more than the {LIST_BYTES:,} bytes allowed.")
    numbers = _unpacked(raw, list[int], where)
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**31:
        raise RecordingError(f"{where}: numbers from {min(numbers)} to {max(numbers)}.")
    return np.array(numbers, np.int64)


PRIME_RL_BATCHES = Dialect(
    name="prime_rl_batches",
    versions="prime-rl 69308b88c0 to 559b44772e (2026-08-19 to 21)",
    source="prime_rl/transports/rollouts types.py (MicroBatch), filesystem.py; trainer/batch.py",
    recognises=holds_batches,
    read=read_batches,
)
