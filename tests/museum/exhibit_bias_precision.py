"""Incidents of the selection bias: its offset, and what is left of it in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from tests.museum.checkpoint import BF16, Checkpoint, rounded
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import glm_model

_GLM_LAYERS = ("text/0",)

#: The offset at which the biases span [6.817, 7.063].
GLM_OFFSET = 6.94


def _glm(offset: float) -> Callable[[], Checkpoint]:
    return lambda: glm_model(offset)


def _cast(offset: float, is_stored_bf16: bool) -> Callable[[], Checkpoint]:
    def build() -> Checkpoint:
        dtype = BF16 if is_stored_bf16 else None
        return glm_model(offset).edited("bias", lambda b, _: rounded(b), dtype=dtype)

    return build


BIAS_BEFORE_CAST = Incident(
    "bias_before_cast",
    ("sgl-project/sglang#37133", "sgl-project/sglang#31213"),
    "GLM-5.2 keeps its selection biases in float32 between 6.817 and 7.063; with a quantisation "
    "config the engine cast them to bfloat16, 8 of 238 values were left, and nearly every token "
    "met other experts.",
    "MGN112",
    (
        Case("biases spread 0.246 around 0.3", _glm(0.3)),
        Case("around 6.94, as in the thread", _glm(GLM_OFFSET), ("MGN112", "MGN115"), _GLM_LAYERS),
        Case("around 34.5", _glm(34.5), ("MGN112", "MGN114", "MGN115"), _GLM_LAYERS),
    ),
    (Case("the same spread around 0, in float32", _glm(0.0)),),
)

BIAS_CAST_IN_FLOAT32 = Incident(
    "bias_cast_in_float32",
    ("sgl-project/sglang#37133", "sgl-project/sglang#31213"),
    "The same biases after the cast, written back as float32: the dtype says nothing any more.",
    "MGN111",
    (
        Case("biases around 0.3", _cast(0.3, False)),
        Case("around 6.94", _cast(GLM_OFFSET, False), ("MGN111", "MGN115"), _GLM_LAYERS),
        Case(
            "around 34.5: one value is left",
            _cast(34.5, False),
            ("MGN111", "MGN114"),
            _GLM_LAYERS,
        ),
    ),
    (Case("around 0: the cast leaves what tells experts apart", _cast(0.0, False)),),
)

BIAS_CAST_IN_BF16 = Incident(
    "bias_cast_in_bfloat16",
    ("sgl-project/sglang#37133", "tenstorrent/tt-metal#47914"),
    "The same biases stored as bfloat16; tt-metal met it at 34.5 with a spread of 0.14.",
    "MGN111",
    (
        Case("biases around 0.3", _cast(0.3, True), ("MGN117",)),
        Case(
            "around 6.94",
            _cast(GLM_OFFSET, True),
            ("MGN111", "MGN113", "MGN115", "MGN117"),
            _GLM_LAYERS,
        ),
        Case(
            "around 34.5: one value is left",
            _cast(34.5, True),
            ("MGN111", "MGN113", "MGN114", "MGN117"),
            _GLM_LAYERS,
        ),
    ),
    (Case("the original in float32, around 0", _glm(0.0)),),
)

BIAS_SWALLOWS_SCORES = Incident(
    "bias_swallows_scores",
    ("sgl-project/sglang#31001", "tenstorrent/tt-metal#47914"),
    "Biases so large that one step of bfloat16 there is wider than what a sigmoid can add: a sum "
    "in bfloat16 routes by the bias alone.",
    "MGN114",
    (
        Case(
            "around 20, where bfloat16 steps by 1/8",
            _glm(20.0),
            ("MGN112", "MGN114", "MGN115"),
            _GLM_LAYERS,
        ),
        Case("around 34.5", _glm(34.5), ("MGN112", "MGN114", "MGN115"), _GLM_LAYERS),
        Case("around 130", _glm(130.0), ("MGN112", "MGN114", "MGN115"), _GLM_LAYERS),
    ),
    (Case("the same spread around 0", _glm(0.0)),),
)

BIAS_OFFSET = Incident(
    "bias_offset",
    ("sgl-project/sglang#31213",),
    "A common offset of the biases grows from update to update; no choice depends on it, but "
    "every digit it takes is lost to the differences.",
    "MGN115",
    (
        Case("offset 0.25, four times the spread", _glm(0.25)),
        Case("offset 0.7, twelve times", _glm(0.7), ("MGN112", "MGN115"), _GLM_LAYERS),
        Case("offset 6.94, 120 times", _glm(GLM_OFFSET), ("MGN112", "MGN115"), _GLM_LAYERS),
    ),
    (Case("no offset", _glm(0.0)),),
)


INCIDENTS = (
    BIAS_BEFORE_CAST,
    BIAS_CAST_IN_FLOAT32,
    BIAS_CAST_IN_BF16,
    BIAS_SWALLOWS_SCORES,
    BIAS_OFFSET,
)
