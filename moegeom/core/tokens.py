"""What crosses the border between recordings and the scan: a source of token ranges.

A source is pulled: the scan asks for rows ``[start, stop)`` of one router, however the files are
cut. Nothing is held for the whole stream, so memory does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from moegeom.core.shapes import Float32, Int16, Int32, Int64, Integer, Shaped

Stage = Literal["router_input", "pre_norm", "logits", "top_logits", "ids", "counts"]

#: Outputs of experts, and their weights, that may be recorded beside any stage.
OutputKind = Literal["shared_output", "routed_output", "expert_output", "routing_weights"]

OUTPUT_KINDS: tuple[OutputKind, ...] = get_args(OutputKind)

#: What a document is to those who record text, and what makes more of them.
ONE_DOCUMENT = "a text file is one document, and so is each line of a .jsonl file"

#: Tokens per work unit. Tiles are aligned to the absolute token index and zero-padded, so that a
#: token meets the same matrix product whatever the batch size. BLAS packs the weights once per
#: product: with 256 tokens that costs a sixth of the time at (7168, 256), with 1024 a twentieth.
TILE = 1024


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """Facts about tokens ``[start, stop)``; -1 where a recording does not say.

    ``domain`` indexes ``TokenSource.domains``.
    """

    document: Int64[np.ndarray, "tokens"]
    position: Int32[np.ndarray, "tokens"]
    token_id: Int32[np.ndarray, "tokens"]
    domain: Int16[np.ndarray, "tokens"]

    def at(self, rows: slice | np.ndarray) -> TokenColumns:
        """Those of some of the tokens."""
        return TokenColumns(**{name: column[rows] for name, column in vars(self).items()})

    def then(self, *more: TokenColumns) -> TokenColumns:
        """These and those of the tokens that follow."""
        parts = (self, *more)
        return TokenColumns(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(self)}
        )


@dataclass(frozen=True, eq=False)
class TopLogits:
    """The m largest logits of each token, descending, and the experts that have them.

    Numbers of experts are int32 when read, and any integers when written.
    """

    logits: Float32[np.ndarray, "tokens m"]
    expert: Integer[np.ndarray, "tokens m"]


@dataclass(frozen=True)
class Oddity:
    """What a trace lacks, or holds in place of choices: ``word`` names the kind, ``text`` says how
    much of it and where, ``hint`` what to do.
    """

    word: str
    text: str
    hint: str


@dataclass(frozen=True)
class SourceFacts:
    """What a source says about itself; printed and stored in ``run.json``.

    ``outputs`` are the kinds, out of ``OUTPUT_KINDS``, that are recorded for every router.
    ``notes`` say, with counts, what was decided about rows that are no tokens; ``oddities`` what
    of the tokens is missing, or no choice of a router.
    """

    name: str
    stage: Stage
    num_tokens: int
    routers: tuple[str, ...]
    domains: tuple[str, ...]
    has_documents: bool
    has_chosen: bool
    engine: str = ""
    fingerprint: str = ""
    num_documents: int | None = None
    size_bytes: int = 0
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    oddities: tuple[Oddity, ...] = ()


@dataclass(frozen=True)
class SampleCounts:
    """``num_drawn`` of ``num_recorded`` tokens that a study looked at: drawn by ``seed``, or named
    (None). ``num_non_finite`` of these are not finite at some router, and were left out, as were
    ``num_outliers``, whose input is far longer or shorter than most.
    """

    num_recorded: int
    num_drawn: int
    num_non_finite: int
    seed: int | None
    num_outliers: int = 0


class TokenSource(Protocol):
    """A recording or a foreign file, readable in any order and any ranges."""

    @property
    def facts(self) -> SourceFacts: ...

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        """Document, position, token id and domain of tokens ``[start, stop)``."""
        ...

    def read_values(self, router: str, start: int, stop: int) -> Shaped[np.ndarray, "tokens width"]:
        """Router inputs (stage ``router_input``), norm inputs (``pre_norm``) or ``logits``.

        Float32 (float64 and 16-bit files are converted; float64 is rounded to float32).
        """
        ...

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        """The m largest logits; only for stage ``top_logits``."""
        ...

    def read_chosen(
        self, router: str, start: int, stop: int
    ) -> Int32[np.ndarray, "tokens top_k"] | None:
        """The experts that the recorded engine chose, in its own order, or None if not known.

        For stage ``ids`` this is the recording itself.
        """
        ...

    def read_output(
        self, router: str, kind: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens *width"] | None:
        """Outputs of experts on tokens ``[start, stop)``, or None where not in ``facts.outputs``.

        ``shared_output`` is what the shared experts gave, (tokens, width). ``routed_output`` is the
        sum of the chosen experts times their routing weights, (tokens, width): the block gave the
        sum of the two. ``expert_output`` is what each expert gives on the token, chosen or not,
        without routing weight, (tokens, experts, width). ``routing_weights`` are the weights of the
        chosen ones, (tokens, top_k), in the order of ``read_chosen``. A kind that is none of
        ``OUTPUT_KINDS`` is an ``InternalError``.
        """
        ...


@runtime_checkable
class StoredValues(Protocol):
    """A source that also gives values as they are stored, without widening them to float32."""

    def stored_dtype(self, router: str) -> np.dtype:
        """Dtype of what ``read_values`` reads; that of ml_dtypes for bfloat16."""
        ...

    def read_stored(self, router: str, start: int, out: Shaped[np.ndarray, "tokens width"]) -> None:
        """Fills ``out``, of the stored dtype or float32, from token ``start`` on."""
        ...


@runtime_checkable
class TensorValues(Protocol):
    """A source whose values may lie in the memory of a GPU already."""

    def tensor(self, router: str) -> Any:
        """What holds all values of a router there, [tokens, width]; None where they do not."""
        ...


@runtime_checkable
class MadeFlips(Protocol):
    """A source that may know what flips cost that were made in the running model."""

    def made_flips(self, router: str) -> Mapping[str, np.ndarray] | None:
        """Columns of a router's flips (``moegeom.tokens.recording.harm``), if there are any."""
        ...


def gpu_of(array: Any) -> int | None:
    """Number of the GPU in whose memory an array of any library lies, by DLPack; else None."""
    if not hasattr(array, "__dlpack_device__"):
        return None
    kind, number = array.__dlpack_device__()
    return int(number) if int(kind) in (2, 13) else None  # kDLCUDA, kDLCUDAManaged


# ------------------------------------------------------------------------------ size of a recording
#: Logits kept beyond the chosen ones, and at least in all: the boundary distance of 99.9 % of the
#: tokens and more is then exact (docs/capture.md).
_BEYOND, _AT_LEAST = 16, 24


def expert_bytes(num_experts: int) -> int:
    """Bytes of the number of an expert."""
    return 1 if num_experts <= 256 else 2 if num_experts <= 32768 else 4


def enough_logits(top_k: int) -> int:
    """How many of the largest logits decide the boundary distance of nearly all tokens."""
    return max(_AT_LEAST, top_k + _BEYOND)


def best_stage(is_affine: bool, has_selection_bias: bool, num_experts: int, top_k: int) -> Stage:
    """The smallest stage from which load, margins and distances follow.

    The largest logits do not decide behind a bias on scores or a mask of groups, and where there
    are no more experts than logits to keep they are all of them.
    """
    decide = is_affine and not has_selection_bias and enough_logits(top_k) < num_experts
    return "top_logits" if decide else "logits"


def common_stage(stages: AbstractSet[Stage]) -> Stage:
    """The stage of a recording of several routers, from the best of each: it has only one."""
    return "logits" if "logits" in stages else "top_logits"


def bytes_per_token(
    stage: Stage,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    num_logits: int = 0,
    float_bytes: int = 4,
) -> int:
    """Bytes of one token at one router, its choice included.

    ``num_logits`` counts for stage ``top_logits``, ``float_bytes`` for hidden states.
    """
    expert = expert_bytes(num_experts)
    values: dict[Stage, int] = {
        "router_input": hidden_size * float_bytes,
        "pre_norm": hidden_size * float_bytes,
        "logits": 4 * num_experts,
        "top_logits": num_logits * (4 + expert),
        "ids": 0,
    }
    return values[stage] + top_k * expert


# -------------------------------------------------------------------------------------------- noise
@dataclass(frozen=True)
class InputNoise:
    """Standard deviation per coordinate; ``is_relative``: in units of the rms of each input.

    Where it was measured: ``relative`` is the scale over the rms of all inputs, ``kappa`` the size
    of the difference in roundings to bfloat16, and ``systematic_share`` the share of its square
    that all tokens have in common; ``num_non_finite`` tokens were left out. None for a number that
    was given.
    """

    scale: float
    is_relative: bool = True
    relative: float | None = None
    kappa: float | None = None
    systematic_share: float | None = None
    num_non_finite: int | None = None
