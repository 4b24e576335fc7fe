"""Recipes of checkpoints as they are on disk: parts that are stale, lost, broken or alike; and of
choices that were joined to other tokens than those they belong to.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from moegeom.core.tokens import TokenColumns
from tests.museum.checkpoint import BF16, Build, Checkpoint, Part, edited, name_of
from tests.museum.disagreements import model, noisy
from tests.museum.healthy import in_float32, sigmoid_model, softmax_model
from tests.museum.questions import SILENT, Checked
from tests.museum.recipe import Planted, Recipe
from tests.museum.recipes_of_rules import damage, of_runs, twin
from tests.museum.two_runs import After, Array, Runs, TwoRuns


def _damage(
    text: str, build: Build, right: str, told: str = "", before: Build | None = None
) -> Planted:
    return Planted(text, lambda: Checked(build(), before and before()), (right,), told)


def _twin(text: str, build: Build, before: Build | None = None) -> Planted:
    return _damage(text, build, SILENT, before=before)


# ------------------------------------------------------------------------- layers for later tokens
#: The layer that predicts a token further on; it stands behind the four of the main stack.
_LATER = 4


@functools.cache
def with_later_layer() -> Checkpoint:
    """The sigmoid model with one layer of multi-token prediction."""
    model, own = in_float32(sigmoid_model()), {}
    parts: tuple[Part, ...] = ("weight", "gain", "bias")
    for part in parts:
        values = model.tensors[name_of(part, 0)]
        order = np.random.default_rng(4494).permutation(len(values))
        own[name_of(part, _LATER)] = (1.1 * values[order]).astype(values.dtype)
    return model.changed(own, {"num_nextn_predict_layers": 1})


def _trained_on(still: Iterable[int] = ()) -> Build:
    """Rows that moved by 2 % and biases by a step; those of some layers stood still."""

    def trained() -> Checkpoint:
        model, new = with_later_layer(), {}
        sizes: dict[Part, float] = {"weight": 0.02 / 16.0, "bias": 0.002}
        for layer in range(_LATER + 1):
            random = np.random.default_rng([4495, layer])
            for part, size in sizes.items():
                values = model.tensors[name_of(part, layer)]
                if part == "weight" or layer not in set(still):
                    step = size * random.standard_normal(values.shape)
                    new[name_of(part, layer)] = (values + step).astype(values.dtype)
        return model.changed(new)

    return trained


def _later_bias(value: float) -> Build:
    name = name_of("bias", _LATER)
    return lambda: with_later_layer().changed(
        {name: np.full_like(with_later_layer().tensors[name], value)}
    )


LATER_BIAS_STALE = Recipe(
    "bias_of_a_later_layer_stale",
    ("pytorch/torchtitan#4494",),
    "The hook that updates selection biases looks at the layers of the main stack alone: those of "
    "the layers for later tokens stay as they were.",
    "The biases of the layer for later tokens are all equal, or stand still while its rows move.",
    "The bias of that layer, and of no other, was not updated.",
    "check",
    "the weights, and a baseline of before",
    (
        _damage("never updated: all 0", _later_bias(0.0), "MGN116", "mtp/4"),
        _damage("never updated: all 0.1", _later_bias(0.1), "MGN116", "mtp/4"),
        _damage("frozen since the baseline", _trained_on((_LATER,)), "MGN123", "mtp/4",
                with_later_layer),
    ),
    (
        _twin("as trained", with_later_layer),
        _twin("every bias moved", _trained_on(), with_later_layer),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------- logit biases
@functools.cache
def with_logit_bias() -> Checkpoint:
    """A gpt-oss of four layers with 32 experts, of which 4 are chosen."""
    model, tensors = softmax_model(), {}
    for layer in model.layers:
        head = f"model.layers.{layer}"
        bias = 0.3 * np.random.default_rng([2319, layer]).standard_normal(32)
        tensors |= {
            f"{head}.mlp.router.weight": model.tensors[name_of("weight", layer)],
            f"{head}.mlp.router.bias": bias.astype(BF16),
            name_of("gain", layer): model.tensors[name_of("gain", layer)],
        }
    config = {
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "rms_norm_eps": 1e-5,
    }
    return Checkpoint(config, tensors)


def _logit_bias(change: Callable[[np.ndarray], np.ndarray | None], layers: Iterable[int]) -> Build:
    names = [f"model.layers.{layer}.mlp.router.bias" for layer in layers]
    return lambda: with_logit_bias().changed(
        {name: change(with_logit_bias().tensors[name]) for name in names}
    )


LOGIT_BIAS_LOST = Recipe(
    "logit_bias_lost",
    ("pytorch/torchtitan#2319", "pytorch/torchtitan#2258"),
    "A trainer's router for gpt-oss had no bias, and the map of names that should have carried it "
    "over had no effect: the model that was saved had none.",
    "The router bias of a gpt-oss is taken out of the file, or is 0 where the source had numbers.",
    "A part of the routers is missing, or is zero since the baseline.",
    "check",
    "the weights, and a baseline of before",
    (
        _damage("not in the file, one layer", _logit_bias(lambda bias: None, (2,)), "MGI107"),
        _damage("not in the file, all layers", _logit_bias(lambda bias: None, range(4)),
                "MGI107"),
        _damage("0 in all layers", _logit_bias(np.zeros_like, range(4)), "MGI128", "zero",
                with_logit_bias),
    ),
    (
        _twin("as the source has it", with_logit_bias, with_logit_bias),
        _twin("a number added to all of them, which changes no choice",
              _logit_bias(lambda bias: (bias.astype(np.float32) + 0.25).astype(np.float32),
                          range(4)), with_logit_bias),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------- selection biases
def _not_finite(value: float, experts: int, layers: Iterable[int]) -> Build:
    def broken(bias: np.ndarray, layer: int) -> np.ndarray:
        return np.where(np.arange(bias.size) < experts, value, bias)

    return edited(sigmoid_model, "bias", broken, layers)


BIAS_NOT_FINITE = Recipe(
    "bias_not_finite",
    ("NVIDIA/TensorRT-Model-Connect#669",),
    "A public fixture of a model holds correction biases that are no finite numbers; engines "
    "choose whatever their sort makes of them.",
    "Selection biases are nan or infinite.",
    "Biases are not finite.",
    "check",
    "the weights",
    (
        _damage("one of 64 is nan, in one layer", _not_finite(np.nan, 1, (1,)), "MGI101"),
        _damage("8 are infinite, in one layer", _not_finite(np.inf, 8, (1,)), "MGI101"),
        _damage("all are nan, in all layers", _not_finite(np.nan, 64, range(4)), "MGI101"),
    ),
    (_twin("finite", sigmoid_model),),
)


def _lost(layers: Iterable[int]) -> Build:
    return edited(sigmoid_model, "bias", lambda bias, _: np.zeros_like(bias), layers)


_recentred = edited(sigmoid_model, "bias", lambda bias, _: bias - bias.mean())

BIAS_NOT_RESTORED = Recipe(
    "bias_not_restored",
    ("flagos-ai/FlagScale#411",),
    "Selection biases were neither saved nor loaded: after each restart they were 0 again.",
    "Biases are 0 where those of the baseline were not.",
    "The biases are zero since the baseline.",
    "check",
    "the weights, and a baseline of before",
    (
        _damage("one layer of four", _lost((3,)), "MGI128", "zero", sigmoid_model),
        _damage("two layers", _lost((2, 3)), "MGI128", "zero", sigmoid_model),
        _damage("all layers", _lost(range(4)), "MGI128", "zero", sigmoid_model),
    ),
    (_twin("their mean taken away, which changes no choice", _recentred, sigmoid_model),),
)


# -------------------------------------------------------------------------------------- equal prompts
def _of_prompts(alike: int, noise: float) -> Build:
    """Rows of so many experts are one row, with noise of a share of its length."""

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        random = np.random.default_rng([93, layer])
        same = weight[0] + noise * random.standard_normal((alike, weight.shape[1])) / 16.0
        return np.concatenate([same, weight[alike:]])

    return edited(softmax_model, "weight", rows)


PROMPTS_IDENTICAL = Recipe(
    "prompts_of_experts_identical",
    ("arcee-ai/mergekit#93",),
    "Routers of a merged model are made of hidden states of prompts; the prompts of all experts "
    "were the same, and so were their rows.",
    "Rows of several experts are one and the same, or nearly so.",
    "Experts have the same row, or nearly the same direction.",
    "check",
    "the weights",
    (
        _damage("two experts of 32, nearly", _of_prompts(2, 0.02), "MGG201"),
        _damage("four experts", _of_prompts(4, 0.0), "MGI104"),
        _damage("all experts", _of_prompts(32, 0.0), "MGI104"),
    ),
    (_twin("a prompt of its own for each", softmax_model),),
)


# ------------------------------------------------------------------- choices joined to other tokens
def _runs(after: After) -> Runs:
    return lambda: TwoRuns(model(), after=after, noise=0.001)


def _span(columns: TokenColumns, documents: Sequence[int], first: int, last: int) -> Array:
    """Tokens at positions from ``first`` up to ``last`` of some documents."""
    there = (columns.position >= first) & (columns.position < last)
    return np.flatnonzero(there & np.isin(columns.document, documents))


def _stale(documents: Sequence[int], rows: int) -> After:
    """Positions from 40 on hold what position 5 of their document chose, in every layer."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out = ids.copy()
        for document in documents:
            fifth = _span(columns, [document], 5, 6)
            out[:, _span(columns, [document], 40, 40 + rows)] = ids[:, fifth]
        return out

    return after


def _repeats(unit: Array, columns: TokenColumns) -> Array:
    """Document 3 says the token at position 5 again, from position 40 on."""
    unit[_span(columns, [3], 40, 107)] = unit[_span(columns, [3], 5, 6)]
    return unit


STALE_ROWS = of_runs(
    "padded_rows_keep_a_stale_row",
    ("sgl-project/sglang#36404",),
    "Rows that a chunk padded were not written, and kept the routes of an earlier token: one row "
    "67 times, at the border of the chunk.",
    "From position 40 on, rows of B become row 5 of their document, in all layers.",
    "B repeats a row, at these positions of these documents.",
    "rows repeated",
    {
        "10 rows of one document": _runs(_stale([3], 10)),
        "67 rows of 2 documents of 16": _runs(_stale([3, 9], 67)),
        "67 rows of 8 documents": _runs(_stale(range(8), 67)),
    },
    {
        "a document that truly repeats one token": lambda: TwoRuns(
            model(), before=_repeats, noise=0.002
        )
    },
    told=r"\b4[01]\b",
)


def _ahead(by: int, first: int, documents: Sequence[int]) -> After:
    """Positions from ``first`` on hold the rows of tokens further on, up to the document's end."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out, length = ids.copy(), int(columns.position.max()) + 1
        for document in documents:
            here = _span(columns, [document], first, length - by)
            out[:, here] = ids[:, here + by]
        return out

    return after


TURNS_MISALIGNED = Recipe(
    "later_turns_misaligned",
    ("inclusionAI/AReno#524",),
    "The turns of a conversation were put together with another count of tokens between them than "
    "the routes: what follows the first turn belongs to other tokens.",
    "From a position on, every row of B is that of the token three further.",
    "B's rows are shifted by as many tokens from that position on.",
    "explain",
    "choices of both runs",
    (
        damage("second half of 4 of 16 documents", _runs(_ahead(3, 64, range(4))),
               "tokens shifted", r"\b6[345]\b|half"),
        damage("second half of every document", _runs(_ahead(3, 64, range(16))),
               "tokens shifted", r"\b6[345]\b|half"),
        damage("from position 16 on, by one", _runs(_ahead(1, 16, range(16))),
               "tokens shifted", r"\b1[567]\b"),
    ),
    (twin("put together rightly", noisy),),
)  # fmt: skip


def _slots(documents: Sequence[int], first: int, last: int) -> After:
    """Ranges of positions hold what the document before chose there."""

    def after(ids: Array, columns: TokenColumns) -> Array:
        out = ids.copy()
        for document in documents:
            here = _span(columns, [document], first, last)
            out[:, here] = ids[:, _span(columns, [(document - 1) % 16], first, last)]
        return out

    return after


SLOT_OCCUPANT = of_runs(
    "rows_of_the_slot_before",
    ("vllm-project/vllm#39568",),
    "Routes were read from slots of a cache that another request had filled before: ranges of rows "
    "belong to a stranger.",
    "Positions 32 to 63 of some documents of B hold the rows of the document before.",
    "B's rows belong to other tokens, in these ranges.",
    "tokens shifted",
    {
        "1 of 16 documents": _runs(_slots([4], 32, 64)),
        "4 documents": _runs(_slots([2, 6, 10, 14], 32, 64)),
        "every document": _runs(_slots(range(16), 32, 64)),
    },
    {"its own slots": noisy},
    told="document|position",
)
