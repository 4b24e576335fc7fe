"""Disagreements because the rows that B routes with are not A's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import BF16, Checkpoint, rounded
from tests.museum.disagreement import Disagreement, Pair
from tests.museum.exhibit_rounding import quantised
from tests.museum.exhibit_smoothing import smoothed
from tests.museum.healthy import in_float32, softmax_model
from tests.museum.two_runs import Engine, TwoRuns

_TOKENS = 4096


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16."""
    return values.astype(BF16).astype(np.float32)


def model() -> Checkpoint:
    """Three layers, 32 experts of which 4 are chosen, rows in float32."""
    return in_float32(softmax_model(layers=3))


def _sent_in_bf16(
    layers: tuple[int, ...], noise: float = 0.0, tokens: int = _TOKENS
) -> Callable[[], TwoRuns]:
    def build() -> TwoRuns:
        cast = model().edited("weight", lambda w, _: rounded(w), layers)
        return TwoRuns(model(), cast, noise=noise, tokens=tokens)

    return build


def noisy(noise: float = 0.002, growth: float = 1.5) -> TwoRuns:
    """Nothing but noise on the inputs, growing with depth."""
    return TwoRuns(model(), noise=noise, growth=growth)


CAST_IN_TRANSFER = Disagreement(
    "router_cast_in_transfer",
    ("PrimeIntellect-ai/prime-rl#3524",),
    "The transfer from the trainer to the engine rounded the routers to bfloat16; sent in float32, "
    "no token differed.",
    (
        Pair("all layers", _sent_in_bf16((0, 1, 2)), "weights rounded", "text/0"),
        Pair(
            "all layers, and noise of 0.03 % on the inputs",
            _sent_in_bf16((0, 1, 2), 0.0003),
            "weights rounded",
            "text/0",
        ),
        Pair(
            "the second layer only",
            _sent_in_bf16((1,), tokens=2 * _TOKENS),
            "weights rounded",
            "text/1",
        ),
    ),
    (
        Pair("sent in float32", lambda: TwoRuns(model()), "no disagreement"),
        Pair("noise of 0.2 % on the inputs instead", noisy, "arithmetic noise only"),
    ),
)


def _quantised(bits: int, named: bool) -> Callable[[], TwoRuns]:
    def build() -> TwoRuns:
        other = softmax_model(layers=3)
        coarse = other.edited("weight", lambda w, _: quantised(w, bits, 128))
        return TwoRuns(other, coarse, against=coarse if named else None, noise=0.0005)

    return build


def _int8_by_127() -> TwoRuns:
    """Rows as codes times a scale by row, multiplied out in float32."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127.0)
        return np.rint(weight / scale) * scale

    return TwoRuns(model(), model().edited("weight", rows), tokens=_TOKENS)


QUANTISED = Disagreement(
    "router_quantised",
    ("huggingface/transformers#48801",),
    "A quantiser took the router for one more linear layer. Where the scheme is on the list the "
    "choices tell; else the quantised checkpoint is named with --checkpoint-b.",
    (
        Pair("int8, scale amax / 127", _int8_by_127, "weights rounded", "text/0"),
        Pair("int4, scale amax / 7", _quantised(4, named=False), "weights rounded", "text/0"),
        Pair("int4, named", _quantised(4, named=True), "weights rounded", "text/0"),
        Pair("int2, named", _quantised(2, named=True), "router stale", "text/0"),
        Pair("int2, not named", _quantised(2, named=False), "inconclusive"),
    ),
    (
        Pair(
            "the original named",
            lambda: TwoRuns(model(), against=model(), noise=0.002),
            "arithmetic noise only",
        ),
    ),
)


def _smoothed(spread: float) -> Callable[[], TwoRuns]:
    def build() -> TwoRuns:
        other = smoothed(softmax_model(layers=3), spread, is_followed=False)
        return TwoRuns(softmax_model(layers=3), other, against=other)

    return build


def _followed() -> TwoRuns:
    """Scales that are powers of two, so that nothing is rounded on either side."""

    def scales(layer: int, size: int) -> np.ndarray:
        return 2.0 ** np.random.default_rng([2451, layer]).integers(-2, 3, size)

    plain = softmax_model(layers=3)
    divided = plain.edited("gain", lambda g, layer: g / scales(layer, g.size))
    other = divided.edited("weight", lambda w, layer: w * scales(layer, w.shape[1]))
    return TwoRuns(plain, other, against=other)


SMOOTHED = Disagreement(
    "gain_smoothed_alone",
    ("vllm-project/llm-compressor#2451", "vllm-project/llm-compressor#1455"),
    "AWQ and SmoothQuant divided the gain of the norm in front by a scale that the router did not "
    "follow; the exported checkpoint is named with --checkpoint-b.",
    (
        Pair("scales between 1/1.2 and 1.2", _smoothed(1.2), "gain not folded", "text/0"),
        Pair("scales between 1/3 and 3", _smoothed(3.0), "gain not folded", "text/0"),
    ),
    (Pair("the router followed", _followed, "no disagreement"),),
)


def _without_gain() -> TwoRuns:
    def unit(gain: np.ndarray, _: int) -> np.ndarray:
        return np.ones_like(gain)

    spread = softmax_model(layers=3).edited(
        "gain", lambda g, layer: g * np.random.default_rng(layer).uniform(0.5, 1.5, g.size)
    )
    return TwoRuns(spread, spread.edited("gain", unit))


GAIN_LEFT_OUT = Disagreement(
    "gain_left_out",
    (),
    "An engine folds the gain of the norm into the experts and forgets the router.",
    (Pair("gains between 0.5 and 1.5", _without_gain, "gain not folded", "text/0"),),
    (Pair("folded into the router too", lambda: TwoRuns(model()), "no disagreement"),),
)


def moved(share: float) -> Checkpoint:
    """The model with rows that moved by a share of their length."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        noise = np.random.default_rng([9, layer]).standard_normal(weight.shape)
        return weight + share * noise / np.sqrt(weight.shape[1])

    return model().edited("weight", rows)


def _stale(share: float, noise: float = 0.001) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(model(), moved(share), against=moved(share), noise=noise)


def _merged() -> Checkpoint:
    def copied(weight: np.ndarray, _: int) -> np.ndarray:
        return np.where(np.arange(len(weight))[:, None] == 9, weight[3], weight)

    return model().edited("weight", copied, (1,))


ANOTHER_REVISION = Disagreement(
    "router_of_another_revision",
    (),
    "The engine kept the routers of an earlier step, or of another revision; that checkpoint is "
    "named with --checkpoint-b.",
    (
        Pair("rows moved by 2 % of their length", _stale(0.02), "router stale", "text/0"),
        Pair("rows moved by 20 %", _stale(0.2), "router stale", "text/0"),
        Pair(
            "a merge gave two experts of the second layer one row",
            lambda: TwoRuns(model(), _merged(), against=_merged(), noise=0.001),
            "router stale",
            "text/1",
        ),
    ),
    (
        Pair(
            "the earlier step named, the right one loaded",
            lambda: TwoRuns(model(), against=moved(0.2), noise=0.002),
            "arithmetic noise only",
        ),
    ),
)


def _rounding(engine: Engine) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(model(), engine=engine, tokens=_TOKENS)


ROUNDED_ON_THE_WAY = Disagreement(
    "rounded_on_the_way",
    (),
    "The engine computes the router in bfloat16: its inputs, or the logits it compares.",
    (
        Pair("logits rounded", _rounding(Engine(logits=bf16)), "logits rounded", "text/0"),
        Pair("inputs rounded", _rounding(Engine(inputs=bf16)), "inputs rounded", "text/0"),
        Pair(
            "inputs and weights rounded",
            _rounding(Engine(inputs=bf16, weight=bf16)),
            "inputs rounded",
            "text/0",
        ),
    ),
    (Pair("noise of 0.2 % on the inputs instead", noisy, "arithmetic noise only"),),
)

DISAGREEMENTS = (
    CAST_IN_TRANSFER,
    QUANTISED,
    SMOOTHED,
    GAIN_LEFT_OUT,
    ANOTHER_REVISION,
    ROUNDED_ON_THE_WAY,
)
