"""Incidents of files: slices, configs, missing parts, unknown scales, no numbers, and tables; and of
rows that were never trained.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.museum.checkpoint import BF16, PARTS, Build, Checkpoint, Part, edited, name_of
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import glm_model, sigmoid_model, softmax_model

_ALL = range(4)


# ----------------------------------------------------------------------------------------- slices
def _sliced(*parts: tuple[Part, int]) -> Build:
    """The first half of parts, each along its axis, in every layer."""

    def build() -> Checkpoint:
        model = sigmoid_model()
        for part, axis in parts:
            model = model.edited(part, lambda v, _, axis=axis: np.array_split(v, 2, axis)[0])
        return model

    return build


SLICE_AS_WHOLE = Incident(
    "slice_as_whole",
    "A sharded save writes a slice of each tensor in each file, under the same name; read without "
    "the offsets in the header, a slice is taken for the tensor.",
    "MGI105",
    Case("half of the selection bias", _sliced(("bias", 0))),
    Case("half of the columns of the router", _sliced(("weight", 1))),
    Case("half of the rows of the router", _sliced(("weight", 0))),
    (Case("the slices joined", sigmoid_model),),
    threads=("pytorch/pytorch#154742", "ByteDance-Seed/VeOmni#461"),
)

EVERY_PART_SLICED = Incident(
    "every_part_sliced",
    "The same when all parts were cut alike, so that they agree with each other and only the "
    "config knows better.",
    "MGI105",
    Case("half of the columns and of the gain", _sliced(("weight", 1), ("gain", 0))),
    Case("half of the rows and of the biases", _sliced(("weight", 0), ("bias", 0))),
    Case("half of everything", _sliced(("weight", 0), ("weight", 1), ("bias", 0), ("gain", 0))),
    (Case("the slices joined", sigmoid_model),),
    threads=("pytorch/pytorch#154742",),
)


def _saying(model: Build, **config: Any) -> Build:
    return lambda: model().changed(config=config)


CONFIG_OF_ANOTHER = Incident(
    "config_of_another_revision",
    "The config beside the weights is that of another revision of the model.",
    "MGI105",
    Case("one more layer than there are routers", _saying(softmax_model, num_hidden_layers=5)),
    Case("twice the experts", _saying(softmax_model, num_experts=64)),
    Case("more experts chosen than there are", _saying(softmax_model, num_experts_per_tok=64)),
    (Case("its own config", softmax_model),),
)


def _lost(rows: int, layers: Sequence[int]) -> Build:
    return edited(softmax_model, "weight", lambda w, _: w[:-rows], layers)


FEWER_EXPERTS = Incident(
    "gate_of_fewer_experts",
    "A pruning or a merge left gates of fewer experts than the config says there are.",
    "MGI105",
    Case("one row less in one layer", _lost(1, [2])),
    Case("eight rows less in two layers", _lost(8, [1, 2])),
    Case("half of the rows in all layers", _lost(16, _ALL)),
    (Case("half of the rows, and the config says so", _saying(_lost(16, _ALL), num_experts=16)),),
)


# ------------------------------------------------------------------------------- parts and storage
def _without_bias(*layers: int) -> Build:
    return lambda: sigmoid_model().changed({name_of("bias", layer): None for layer in layers})


PART_MISSING = Incident(
    "selection_bias_missing",
    "A conversion kept parameters and dropped buffers: the selection bias is gone, and loaders "
    "put zeros in its place.",
    "MGI107",
    Case("in one layer of four", _without_bias(2)),
    Case("in two layers", _without_bias(1, 2)),
    Case("in all layers", _without_bias(*_ALL)),
    (Case("all parts there", sigmoid_model),),
)


def _beside(leaf: str, shape: tuple[int, ...], layers: Sequence[int]) -> Checkpoint:
    stem = PARTS["weight"].removesuffix("weight")
    ones = {f"{stem.format(layer=layer)}{leaf}": np.ones(shape, np.float32) for layer in layers}
    return softmax_model().changed(ones)


def _gptq() -> Checkpoint:
    """Routers packed as GPTQ packs them, eight 4-bit numbers in an int32, and no plain weight."""
    new: dict[str, np.ndarray | None] = {}
    for layer in softmax_model().layers:
        stem = name_of("weight", layer).removesuffix("weight")
        new[f"{stem}weight"] = None
        new[f"{stem}qweight"] = np.zeros((32, 32), np.int32)
        new[f"{stem}qzeros"] = np.zeros((2, 4), np.int32)
        new[f"{stem}scales"] = np.ones((2, 32), np.float16)
        new[f"{stem}g_idx"] = np.arange(256, dtype=np.int32) // 128
    return softmax_model().changed(new)


STORAGE_UNKNOWN = Incident(
    "storage_unknown",
    "Routers in the storage of a quantiser, or with a tensor beside them that may be a scale: "
    "without it the numbers in the file are not the weights.",
    "MGI106",
    Case(
        "an unknown scale beside the router of one layer",
        partial(_beside, "channel_scale", (32, 1), [1]),
    ),
    Case("an unknown scale beside every router", partial(_beside, "input_scale", (1,), _ALL)),
    Case("GPTQ: qweight, qzeros, scales and g_idx, no weight", _gptq),
    (Case("plain weights", softmax_model),),
    threads=("intel/auto-round#1776",),
)


def _overwritten(part: Part, value: float, *sizes: int) -> Build:
    def overwritten(values: np.ndarray, _: int) -> np.ndarray:
        values[tuple(slice(size) for size in sizes)] = value
        return values

    return edited(softmax_model, part, overwritten, (2,))


ZERO_ROWS = Incident(
    "zero_rows",
    "Rows that were never written: an expert added, or a slice lost, and zeros left.",
    "MGI103",
    Case("one row of 32", _overwritten("weight", 0.0, 1), (2,)),
    Case("four rows", _overwritten("weight", 0.0, 4), (2,), ("MGI104",)),
    Case("half of the rows", _overwritten("weight", 0.0, 16), (2,), ("MGG204", "MGG205", "MGI104")),
    (Case("every row written", softmax_model),),
)

NON_FINITE_ROWS = Incident(
    "non_finite_rows",
    "Training diverged, or bytes were damaged: rows with nan or infinity.",
    "MGI101",
    Case("one nan in one row", _overwritten("weight", np.nan, 1, 1), (2,)),
    Case("one row infinite", _overwritten("weight", np.inf, 1), (2,)),
    Case("every row nan", _overwritten("weight", np.nan, 32), (2,)),
    (Case("every row finite", softmax_model),),
)

NON_FINITE_GAIN = Incident(
    "non_finite_gain",
    "The gain of the norm in front holds nan or infinity, and with it every router input.",
    "MGI102",
    Case("one entry infinite", _overwritten("gain", np.inf, 1), (2,)),
    Case("one entry nan", _overwritten("gain", np.nan, 1), (2,)),
    Case("every entry nan", _overwritten("gain", np.nan, 256), (2,)),
    (Case("every entry finite", softmax_model),),
)


# ---------------------------------------------------------------------------------------- configs
def _without(*keys: str) -> Build:
    def without() -> Checkpoint:
        model = sigmoid_model()
        config = {key: value for key, value in model.config.items() if key not in keys}
        return Checkpoint(config, model.tensors)

    return without


#: Where the config leaves the rule to a default, a warning; under the profile release an error.
_WARNED = (0, 1)

GATING_UNSAID = Incident(
    "gating_function_unsaid",
    "A conversion left out the key that names the gating function; engines took their default, "
    "softmax for sigmoid, and importance matrices were measured of that model.",
    "MGI113",
    Case("no topk_method", _without("topk_method"), exits=_WARNED),
    Case("no scoring_func", _without("scoring_func"), exits=_WARNED),
    Case("neither", _without("topk_method", "scoring_func"), exits=_WARNED),
    (Case("both keys there", sigmoid_model),),
    threads=("ikawrakow/ik_llama.cpp#1174", "ggml-org/llama.cpp#18980"),
)


def _groups(count: int, kept: int, k: int = 4) -> Build:
    return _saying(sigmoid_model, n_group=count, topk_group=kept, num_experts_per_tok=k)


GROUPS_IMPOSSIBLE = Incident(
    "groups_impossible",
    "Groups of experts that cannot be: the sum of the two largest scores of groups of one expert "
    "crosses into the scores of another token.",
    "MGI105",
    Case("9 of 8 groups are kept", _groups(8, 9)),
    Case("the groups that are kept hold 8 experts, of which 12 are chosen", _groups(8, 1, 12)),
    Case("64 groups of one expert", _groups(64, 8)),
    (Case("4 of 8 groups", _groups(8, 4)),),
    threads=("huggingface/transformers#48647", "huggingface/transformers#48649"),
)


def _quantised(**said: Any) -> Build:
    table = {"quant_method": "compressed-tensors", **said}
    return _saying(softmax_model, quantization_config=table)


def _targets(*names: str) -> dict[str, dict[str, list[str]]]:
    return {"group_0": {"targets": list(names)}}


_OTHERS = ["lm_head", "re:.*self_attn.*", "gate_proj"]

ROUTERS_NOT_EXCLUDED = Incident(
    "routers_not_excluded",
    "The routers are stored plain, and the quantization_config says that every linear module is "
    "quantised: the engine made a quantised router and looked for scales.",
    "MGN119",
    Case(
        "the list of exceptions lacks one layer of four",
        _quantised(ignore=["lm_head", *(f"model.layers.{n}.mlp.gate" for n in (0, 1, 3))]),
        (2,),
    ),
    Case(
        "it names other modules, gate_proj among them",
        _quantised(config_groups=_targets("Linear"), ignore=_OTHERS),
        _ALL,
    ),
    Case("there is no list", _quantised(), _ALL),
    (
        Case("a regular expression", _quantised(ignore=["lm_head", "re:.*mlp.gate$"])),
        Case("a glob", _quantised(exclude_modules=["*mlp.gate*"])),
        Case("the end of the name", _quantised(modules_to_not_convert=["mlp.gate"])),
        Case(
            "experts alone are targets", _quantised(config_groups=_targets("re:.*experts.*proj$"))
        ),
        Case("no quantisation", softmax_model),
    ),
    threads=("vllm-project/vllm#23031", "vllm-project/vllm#22881"),
)


def _negative(count: int) -> Build:
    """Of each of the two groups so many biases 0.02 to 0.06 below 0, the others as much above."""

    def signed(_: np.ndarray, layer: int) -> np.ndarray:
        sizes = 0.04 + 0.02 * np.random.default_rng([741, layer]).uniform(-1.0, 1.0, 64)
        return np.where(np.arange(64) % 32 < count, -sizes, sizes)

    return edited(sigmoid_model, "bias", signed)


DROPPED_GROUPS_WIN = Incident(
    "dropped_groups_win",
    "Scores of dropped groups were filled with 0.0 instead of -inf: kept experts whose score and "
    "bias sum up to less than 0 lose against them.",
    "MGN120",
    Case("29 of 32 biases of a group are below 0", _negative(29), _ALL),
    Case("31 of 32", _negative(31), _ALL),
    Case("all of them", _negative(32), _ALL),
    (Case("28 of 32: four are sure to beat 0.0", _negative(28)), Case("as trained", sigmoid_model)),
    threads=(
        "deepseek-ai/DeepSeek-V3#741",
        "sgl-project/sglang#3705",
        "huggingface/transformers#45440",
    ),
)

SCORE_FROM_SUM = Incident(
    "score_taken_back_from_the_sum",
    "A kernel kept the sum of score and bias and took the score back as the difference: beside a "
    "bias of 12 a small score is rounded away, and every weight is 0.",
    "MGN114",
    Case("biases around 8.5", partial(glm_model, 8.5), (0,), ("MGN112", "MGN115")),
    Case("around 12", partial(glm_model, 12.0), (0,), ("MGN112", "MGN115")),
    Case("around 34.5", partial(glm_model, 34.5), (0,), ("MGN112", "MGN115")),
    (Case("around 0", partial(glm_model, 0.0)),),
    threads=("flashinfer-ai/flashinfer#3875",),
)

# ----------------------------------------------------------------------------------------- tables
_TABLE = "model.layers.1.mlp.gate.tid2eid"


@functools.cache
def hashed_model(experts: int) -> Checkpoint:
    """A deepseek_v4 whose layer 1 looks 4 of so many experts up for each of 2,000 tokens."""
    random = np.random.default_rng([159, experts])
    wide = random.standard_normal((experts, 256)) / 16.0
    table = np.stack([random.choice(experts, 4, replace=False) for _ in range(2000)])
    new = {
        name_of("bias", 1): None,
        name_of("weight", 1): wide.astype(BF16),
        _TABLE: table.astype(np.int64),
    }
    return sigmoid_model().changed(new, {"model_type": "deepseek_v4"})


def _cast(experts: int) -> Checkpoint:
    model = hashed_model(experts)
    return model.changed({_TABLE: model.tensors[_TABLE].astype(BF16).astype(np.int64)})


def _repeated() -> Checkpoint:
    table = hashed_model(384).tensors[_TABLE].copy()
    table[:3, 1] = table[:3, 0]
    return hashed_model(384).changed({_TABLE: table})


#: A layer that looks its experts up is not measured, which the profile release asks for.
_LEFT_OUT = (0, 4)

TABLE_CAST = Incident(
    "token_table_cast",
    "A cast of the whole checkpoint to bfloat16 took the table of experts by token id with it: "
    "above 256 the odd ids became even ones, and the largest became an expert that does not exist.",
    "MGI111",
    Case("three of 2,000 rows name an expert twice", _repeated, (1,)),
    Case("320 experts, through bfloat16", partial(_cast, 320), (1,)),
    Case("384 experts, through bfloat16", partial(_cast, 384), (1,)),
    (
        Case("the table as it was", partial(hashed_model, 384), exits=_LEFT_OUT),
        Case(
            "256 experts, through bfloat16, which holds every id",
            partial(_cast, 256),
            exits=_LEFT_OUT,
        ),
    ),
    threads=("ISEEKYAN/mbridge#159", "verl-project/verl-ascend-recipe#126"),
)


# --------------------------------------------------------------------- rows that were never trained
#: What the config draws with: four fifths of the spread of the trained rows.
_RANGE = 0.8 / np.sqrt(512)


def model() -> Checkpoint:
    """Trained rows share a direction, and are longer than drawn ones."""

    def shared(weight: np.ndarray, layer: int) -> np.ndarray:
        direction = np.random.default_rng([2995, layer]).standard_normal(weight.shape[1])
        return weight + 0.3 * direction / np.sqrt(direction.size)

    trained = softmax_model(hidden=512).changed(config={"initializer_range": float(_RANGE)})
    return trained.edited("weight", shared)


def _drawn(layers: Sequence[int], rows: slice = slice(None)) -> Build:
    def drawn(weight: np.ndarray, layer: int) -> np.ndarray:
        fresh = _RANGE * np.random.default_rng([858, layer]).standard_normal(weight.shape)
        weight[rows] = fresh[rows]
        return weight

    return edited(model, "weight", drawn, layers)


ROWS_NEVER_TRAINED = Incident(
    "rows_never_trained",
    "No gradient reached the router, or a part of its rows: it is as it was drawn, and routes no "
    "better than a random one.",
    "MGG207",
    Case("half of the rows of one layer", _drawn([1], slice(16, 32)), (1,)),
    Case("one layer of four", _drawn([1]), (1,)),
    Case("all layers", _drawn(range(4)), range(4)),
    (Case("as trained", model),),
    threads=("NVIDIA-NeMo/Automodel#2995", "jingyaogong/minimind#858"),
)
