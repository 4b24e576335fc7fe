"""The words in which a case says what is wrong with it: operators, scopes, and the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Operator(StrEnum):
    """What a fault does, whatever it does it to."""

    # the router's rows, as they were loaded
    ROWS_PERMUTED = "rows_permuted"
    ROWS_INTERLEAVED = "rows_interleaved"
    ROWS_SHIFTED = "rows_shifted"
    ROWS_DUPLICATED = "rows_duplicated"
    ROWS_ZEROED = "rows_zeroed"
    ROW_SCALED = "row_scaled"
    WEIGHTS_TRANSPOSED = "weights_transposed"
    WEIGHTS_OF_ANOTHER_LAYER = "weights_of_another_layer"
    WEIGHTS_OF_OLDER_CHECKPOINT = "weights_of_older_checkpoint"
    WEIGHTS_OF_ANOTHER_TRAINING = "weights_of_another_training"
    WEIGHTS_AT_INITIALISATION = "weights_at_initialisation"
    WEIGHTS_SCALED = "weights_scaled"
    LOW_RANK_UPDATE = "low_rank_update"
    WEIGHTS_BF16 = "weights_bf16"
    WEIGHTS_FP8_E4M3 = "weights_fp8_e4m3"
    WEIGHTS_FP8_E5M2 = "weights_fp8_e5m2"
    WEIGHTS_INT8 = "weights_int8"
    WEIGHTS_INT4 = "weights_int4"
    WEIGHTS_BF16_AFTER_INT8 = "weights_bf16_after_int8"
    # the bias
    BIAS_DROPPED = "bias_dropped"
    BIAS_NEGATED = "bias_negated"
    BIAS_OFFSET = "bias_offset"
    BIAS_SHIFTED = "bias_shifted"
    BIAS_BF16 = "bias_bf16"
    BIAS_OF_ANOTHER_LAYER = "bias_of_another_layer"
    BIAS_OF_OLDER_CHECKPOINT = "bias_of_older_checkpoint"
    BIAS_MISREAD = "bias_misread"
    # the gain of the norm
    GAIN_DROPPED = "gain_dropped"
    GAIN_TWICE = "gain_twice"
    GAIN_PLUS_ONE = "gain_plus_one"
    GAIN_OF_ANOTHER_LAYER = "gain_of_another_layer"
    # what the router reads
    INPUT_OF_ANOTHER_TOKEN = "input_of_another_token"
    INPUT_STALE = "input_stale"
    INPUT_OF_ANOTHER_LAYER = "input_of_another_layer"
    INPUT_NORMALISED_TWICE = "input_normalised_twice"
    INPUT_BF16 = "input_bf16"
    INPUT_FP8 = "input_fp8"
    INPUT_NOISE = "input_noise"
    # the cache that the layers keep between two steps
    CACHE_LEFT_OVER = "cache_left_over"
    CACHE_LOST = "cache_lost"
    CACHE_TOKEN_TWICE = "cache_token_twice"
    CACHE_TOKEN_SKIPPED = "cache_token_skipped"
    CACHE_OF_ANOTHER_REQUEST = "cache_of_another_request"
    CACHE_FP8 = "cache_fp8"
    # the rule
    OTHER_SCORE = "other_score"
    SOFTMAX_MOVED = "softmax_moved"
    GROUP_SCORE = "group_score"
    GROUP_COUNT = "group_count"
    GROUPS_IGNORED = "groups_ignored"
    GROUP_FILL = "group_fill"
    TOP_K_MORE = "top_k_more"
    TOP_K_FEWER = "top_k_fewer"
    BIAS_IN_WEIGHTS = "bias_in_weights"
    BIAS_NOT_IN_SELECTION = "bias_not_in_selection"
    RENORMALISATION_FLIPPED = "renormalisation_flipped"
    OTHER_SCALE = "other_scale"
    SOFT_CAP = "soft_cap"
    TIES_TO_HIGH_INDEX = "ties_to_high_index"
    # the dispatch
    CAPACITY_DROPPED = "capacity_dropped"
    CAPACITY_REROUTED = "capacity_rerouted"
    # what is written
    EXPERTS_RENAMED = "experts_renamed"
    EXPERTS_OFFSET = "experts_offset"
    REPLICA_IDS = "replica_ids"
    IDS_INT8 = "ids_int8"
    IDS_UINT8 = "ids_uint8"
    IDS_SORTED = "ids_sorted"
    PADDING_ROWS = "padding_rows"
    WRITTEN_ROWS_SHIFTED = "written_rows_shifted"
    WRITTEN_ROWS_STALE = "written_rows_stale"
    WRITTEN_LAYERS_SHIFTED = "written_layers_shifted"
    # nothing at all: rounding differs
    NOISE = "noise"


class Scope(StrEnum):
    """Where a fault acts. Those of tokens and of experts act in every layer."""

    ALL = "all"
    ONE_LAYER = "one_layer"
    LAYERS_FROM = "layers_from"
    LAYER_INTERVAL = "layer_interval"
    EXPERT_SET = "expert_set"
    EXPERT_BLOCK = "expert_block"
    EXPERT_HALF = "expert_half"
    DOCUMENTS = "documents"
    POSITIONS_FROM = "positions_from"
    POSITIONS_BEFORE = "positions_before"
    POSITION_INTERVAL = "position_interval"
    EVERY_NTH = "every_nth"
    CHUNK_STARTS = "chunk_starts"
    RANKS = "ranks"


#: Operators that no recording can tell apart, whatever it holds: either word is right.
SAME_TO_ANY_READER: tuple[frozenset[Operator], ...] = (
    frozenset({Operator.BIAS_DROPPED, Operator.BIAS_NOT_IN_SELECTION}),
)

#: Operators after which a reader may well refuse the trace: its ids cannot be choices.
MAY_BE_REFUSED = frozenset({Operator.REPLICA_IDS, Operator.IDS_INT8, Operator.IDS_UINT8})


@dataclass(frozen=True)
class Effect:
    """What a fault alone changes against the healthy twin, in tokens.

    ``sets`` and ``weights`` differ at ``first_layer``, the lowest of the fault's layers;
    ``later_sets`` counts (token, layer) pairs above it.
    """

    first_layer: int
    sets: int
    weights: int
    later_sets: int


@dataclass(frozen=True)
class Truth:
    """What is wrong: the operator, where it acts, and what it did.

    ``share_of_tokens`` are those at which it acts itself, not those which it reaches through later
    layers. ``parameters`` are what was drawn, as text, for people.
    """

    operator: Operator
    scope: Scope
    layers: tuple[int, ...]
    share_of_tokens: float
    effect: Effect
    parameters: Mapping[str, str]
    may_be_refused: bool = False
