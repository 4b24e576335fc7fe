"""Disagreements that are not the router's: places, numbers, padding, and what lies beyond it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moegeom.core.tokens import TokenColumns
from tests.museum.disagreement import Disagreement, Pair
from tests.museum.disagreements_of_weights import model, noisy
from tests.museum.two_runs import Array, TwoRuns


def _changed(after: Callable[[Array, TokenColumns], Array], noise: float) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(model(), after=after, noise=noise)


def _one_row_short(ids: Array, columns: TokenColumns) -> Array:
    """Rows moved up by one, as if the first of each document had never been recorded."""
    out = ids.copy()
    for document in np.unique(columns.document):
        rows = np.flatnonzero(columns.document == document)
        out[:, rows[:-1]] = ids[:, rows[1:]]
    return out


ROWS_SHIFTED = Disagreement(
    "ids_one_row_short",
    ("PrimeIntellect-ai/prime-rl#1807",),
    "An engine never routes the last token it samples, so that its ids are one row short; filled "
    "up at the wrong end, every row is that of another token.",
    (
        Pair("every document", _changed(_one_row_short, 0.0), "tokens shifted"),
        Pair("with noise of 0.3 %", _changed(_one_row_short, 0.003), "tokens shifted"),
    ),
    (Pair("filled up at the right end", noisy, "arithmetic noise only"),),
)


def _one_layer_down(ids: Array, _: TokenColumns) -> Array:
    return np.roll(ids, 1, axis=0)


LAYERS_SHIFTED = Disagreement(
    "dense_layer_counted",
    (),
    "One side counts a dense layer in front and the other does not.",
    (Pair("by one layer", _changed(_one_layer_down, 0.001), "layers shifted"),),
    (Pair("counted alike", noisy, "arithmetic noise only"),),
)


def _padded(share: float) -> Callable[[Array, TokenColumns], Array]:
    def after(ids: Array, columns: TokenColumns) -> Array:
        out, length = ids.copy(), int(columns.position.max()) + 1
        out[:, columns.position >= length * (1.0 - share)] = np.arange(ids.shape[2])
        return out

    return after


PADDING = Disagreement(
    "padding_as_experts",
    ("radixark/miles#645", "THUDM/slime#1052"),
    "Sequences were padded to one length, and the padding holds valid numbers of experts.",
    (
        Pair("2 % of each document", _changed(_padded(0.02), 0.001), "padding counted"),
        Pair("half of each document", _changed(_padded(0.5), 0.001), "padding counted"),
    ),
    (Pair("no padding", noisy, "arithmetic noise only"),),
)


def _renamed(moved: int) -> Callable[[Array, TokenColumns], Array]:
    def after(ids: Array, _: TokenColumns) -> Array:
        numbers = np.arange(32)
        some = np.random.default_rng(5).choice(32, moved, replace=False)
        numbers[some] = np.roll(some, 1)
        return numbers[ids].astype(ids.dtype)

    return after


RENAMED = Disagreement(
    "physical_ids",
    (),
    "Expert load balancing moves experts to other places, and the ids are those of the places.",
    (
        Pair("two experts", _changed(_renamed(2), 0.001), "experts renamed", "text/0"),
        Pair("all experts", _changed(_renamed(32), 0.001), "experts renamed", "text/0"),
    ),
    (Pair("logical ids", noisy, "arithmetic noise only"),),
)


def _at_random(share: float) -> Callable[[Array, TokenColumns], Array]:
    """Some tokens get any experts, the same tokens in all layers from the second on."""

    def after(ids: Array, _: TokenColumns) -> Array:
        generator, out = np.random.default_rng(6), ids.copy()
        hit = np.flatnonzero(generator.random(ids.shape[1]) < share)
        for layer in range(1, len(ids)):
            for token in hit:
                out[layer, token] = generator.choice(32, ids.shape[2], replace=False)
        return out

    return after


RACE = Disagreement(
    "some_tokens_at_random",
    (),
    "A race, or a buffer read too early: some tokens get experts that have nothing to do with them.",
    (
        Pair("1 % of the tokens", _changed(_at_random(0.01), 0.001), "beyond noise", "text/1"),
        Pair("10 % of the tokens", _changed(_at_random(0.1), 0.001), "beyond noise", "text/1"),
    ),
    (Pair("noise of 2 %", lambda: noisy(0.02, 1.0), "arithmetic noise only"),),
)


def _log_probs(nats: float) -> Callable[[np.random.Generator, int], Array]:
    return lambda generator, tokens: nats * generator.standard_normal(tokens)


def _scored(nats: float, noise: float) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(model(), noise=noise, log_probs=_log_probs(nats))


def _moved_inputs(noise: float) -> Callable[[], TwoRuns]:
    return lambda: TwoRuns(model(), noise=noise, keeps="inputs")


NOT_THE_ROUTER = Disagreement(
    "not_the_router",
    ("NVIDIA-NeMo/RL#4243", "sgl-project/sglang#18213", "PrimeIntellect-ai/prime-rl#3583"),
    "Log-probabilities of trainer and engine drifted apart; routers in float64 did not help, "
    "because the router was not the cause.",
    (
        Pair("0.1 nats, routing alike", _scored(0.15, 0.001), "not the router"),
        Pair("1 nat, routing equal", _scored(1.3, 0.0), "not the router"),
        Pair("inputs that moved by 10 %, recorded", _moved_inputs(0.1), "not the router"),
    ),
    (
        Pair("0.01 nats", _scored(0.01, 0.002), "arithmetic noise only"),
        Pair("inputs that moved by 0.3 %, recorded", _moved_inputs(0.003), "arithmetic noise only"),
    ),
    "choices and log-probabilities of both runs",
)


def _drawn(ids: Array, _: TokenColumns) -> Array:
    """Any experts for every token."""
    generator = np.random.default_rng(8)
    return generator.random((*ids.shape[:2], 32)).argsort(axis=2)[..., : ids.shape[2]]


def _other_model() -> TwoRuns:
    """B ran, and says that it ran, a model whose rows are others."""

    def drawn(weight: Array, layer: int) -> Array:
        drawn = np.random.default_rng([9, layer]).standard_normal(weight.shape)
        return (drawn * weight.std()).astype(np.float32)

    return TwoRuns(model(), model().edited("weight", drawn), names_fingerprints=True)


NOT_OF_THIS_MODEL = Disagreement(
    "not_of_this_model",
    (),
    "The file of the other run was of another model, or no choices at all.",
    (
        Pair("a recording that names another checkpoint", _other_model, "another checkpoint"),
        Pair("any experts for every token", _changed(_drawn, 0.0), "unrelated"),
    ),
    (Pair("recorded from this model", noisy, "arithmetic noise only"),),
)

DISAGREEMENTS = (
    ROWS_SHIFTED,
    LAYERS_SHIFTED,
    PADDING,
    RENAMED,
    RACE,
    NOT_THE_ROUTER,
    NOT_OF_THIS_MODEL,
)
