"""Incidents of the selection bias: its offset, its digits, and its updates."""

from functools import partial

import numpy as np

from tests.museum.checkpoint import BF16, Build, Checkpoint, edited, rounded
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import glm_model, in_float32, sigmoid_model

_ALL = range(4)

# ----------------------------------------------------------------------------------------- digits
#: The offset at which the biases span [6.817, 7.063].
GLM_OFFSET = 6.94


def _glm(offset: float) -> Build:
    return partial(glm_model, offset)


def _cast(offset: float, dtype: np.dtype | None = None) -> Build:
    return edited(_glm(offset), "bias", lambda b, _: rounded(b), dtype=dtype)


_ROUNDED_AND_OFFSET = ("MGN112", "MGN115")

BIAS_BEFORE_CAST = Incident(
    "bias_before_cast",
    "GLM-5.2 keeps its selection biases in float32 between 6.817 and 7.063; with a quantisation "
    "config the engine cast them to bfloat16, 8 of 238 values were left, and nearly every token "
    "met other experts.",
    "MGN112",
    Case("biases spread 0.246 around 0.3", _glm(0.3), is_missed=True),
    Case("around 6.94, as in the thread", _glm(GLM_OFFSET), (0,), ("MGN115",)),
    Case("around 34.5", _glm(34.5), (0,), ("MGN114", "MGN115")),
    (Case("the same spread around 0, in float32", _glm(0.0)),),
    threads=("sgl-project/sglang#37133", "sgl-project/sglang#31213"),
)

BIAS_CAST_IN_FLOAT32 = Incident(
    "bias_cast_in_float32",
    "The same biases after the cast, written back as float32: the dtype says nothing any more.",
    "MGN111",
    Case("biases around 0.3", _cast(0.3), is_missed=True),
    Case("around 6.94", _cast(GLM_OFFSET), (0,), ("MGN115",)),
    Case("around 34.5: one value is left", _cast(34.5), (0,), ("MGN114",)),
    (Case("around 0: the cast leaves what tells experts apart", _cast(0.0)),),
    threads=("sgl-project/sglang#37133", "sgl-project/sglang#31213"),
)

BIAS_CAST_IN_BF16 = Incident(
    "bias_cast_in_bfloat16",
    "The same biases stored as bfloat16; tt-metal met it at 34.5 with a spread of 0.14.",
    "MGN111",
    Case("biases around 0.3", _cast(0.3, BF16), beside=("MGN117",), is_missed=True),
    Case("around 6.94", _cast(GLM_OFFSET, BF16), (0,), ("MGN113", "MGN115", "MGN117")),
    Case("around 34.5: one value is left", _cast(34.5, BF16), (0,), ("MGN113", "MGN114", "MGN117")),
    (Case("the original in float32, around 0", _glm(0.0)),),
    threads=("sgl-project/sglang#37133", "tenstorrent/tt-metal#47914"),
)

BIAS_SWALLOWS_SCORES = Incident(
    "bias_swallows_scores",
    "Biases so large that one step of bfloat16 there is wider than what a sigmoid can add: a sum "
    "in bfloat16 routes by the bias alone.",
    "MGN114",
    Case("around 20, where bfloat16 steps by 1/8", _glm(20.0), (0,), _ROUNDED_AND_OFFSET),
    Case("around 34.5", _glm(34.5), (0,), _ROUNDED_AND_OFFSET),
    Case("around 130", _glm(130.0), (0,), _ROUNDED_AND_OFFSET),
    (Case("the same spread around 0", _glm(0.0)),),
    threads=("sgl-project/sglang#31001", "tenstorrent/tt-metal#47914"),
)

BIAS_OFFSET = Incident(
    "bias_offset",
    "A common offset of the biases grows from update to update; no choice depends on it, but "
    "every digit it takes is lost to the differences.",
    "MGN115",
    Case("offset 0.25, four times the spread", _glm(0.25), is_missed=True),
    Case("offset 0.7, twelve times", _glm(0.7), (0,), ("MGN112",)),
    Case("offset 6.94, 120 times", _glm(GLM_OFFSET), (0,), ("MGN112",)),
    (Case("no offset", _glm(0.0)),),
    threads=("sgl-project/sglang#31213",),
)


# ---------------------------------------------------------------------------------------- updates
def _constant(value: float, layers: range = _ALL) -> Build:
    return edited(sigmoid_model, "bias", lambda b, _: np.full_like(b, value), layers)


BIAS_NEVER_UPDATED = Incident(
    "bias_never_updated",
    "A DeepSeek-V3 training declared the routing bias and never updated it: without a gradient and "
    "without an update rule it stays what it was initialised to.",
    "MGN116",
    Case("one layer of four all 0", _constant(0.0, range(2, 3)), (2,)),
    Case("all layers 0", _constant(0.0), _ALL),
    Case("all layers one constant, 0.5", _constant(0.5), _ALL),
    (Case("biases that were updated", sigmoid_model),),
    threads=("AI-Hypercomputer/maxtext#2494",),
)


def trainable_model() -> Checkpoint:
    """Rows in float32, so that the smallest movement is not rounded away."""
    return in_float32(sigmoid_model())


def _moved(share: float, step: float = 0.0) -> Build:
    """Rows that moved by a share of their length, biases by a step up or down."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        noise = np.random.default_rng([2953, layer]).standard_normal(weight.shape)
        return weight + share * noise / np.sqrt(weight.shape[1])

    def biases(bias: np.ndarray, layer: int) -> np.ndarray:
        up = np.random.default_rng([2954, layer]).random(len(bias)) < 0.5
        return bias + np.where(up, step, -step)

    return edited(edited(trainable_model, "weight", rows), "bias", biases)


BIAS_FROZEN = Incident(
    "bias_frozen",
    "The trainer loaded the biases and left them where they were: rows trained on, and nothing "
    "balanced the load any more.",
    "MGN123",
    Case("rows moved by 0.02 % of their length", _moved(0.0002), is_missed=True),
    Case("rows moved by 0.5 %", _moved(0.005), _ALL),
    Case("rows moved by 5 %", _moved(0.05), _ALL, ("MGG401",)),
    (Case("rows moved by 0.5 %, biases by 0.0005", _moved(0.005, 0.0005)),),
    trainable_model,
    threads=("PrimeIntellect-ai/prime-rl#2953",),
)


def _runaway(value: float) -> Build:
    def lowered(bias: np.ndarray, _: int) -> np.ndarray:
        return np.where(np.arange(len(bias)) == 9, value, bias)

    return edited(sigmoid_model, "bias", lowered, (1,))


BIAS_RAN_AWAY = Incident(
    "bias_ran_away",
    "A bias that an update rule kept lowering: a sigmoid adds at most 1, so below about -1 no "
    "input brings the expert back.",
    "MGI110",
    Case("one bias at -0.9: still reachable by the best inputs", _runaway(-0.9), is_missed=True),
    Case("one bias at -1.5", _runaway(-1.5), (1,)),
    Case("one bias at -3", _runaway(-3.0), (1,)),
    (Case("one bias at -0.3", _runaway(-0.3)),),
)
