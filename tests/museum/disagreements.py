"""Every disagreement, in the order of the page: of rows, of biases and rules, and elsewhere."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from moegeom.core.tokens import TokenColumns
from tests.museum.checkpoint import BF16, Checkpoint, rounded
from tests.museum.exhibit_quantisers import quantised, smoothed
from tests.museum.healthy import glm_model, in_float32, sigmoid_model, softmax_model
from tests.museum.two_runs import After, Array, Disagreement, Engine, LogProbs, Pair, Runs, TwoRuns


def bf16(values: Array) -> Array:
    return values.astype(BF16).astype(np.float32)


def model() -> Checkpoint:
    """Three layers, 32 experts of which 4 are chosen, rows in float32."""
    return in_float32(softmax_model(layers=3))


def noisy(noise: float = 0.002, growth: float = 1.5) -> TwoRuns:
    return TwoRuns(model(), noise=noise, growth=growth)


def _equal() -> TwoRuns:
    return TwoRuns(model())


# ------------------------------------------------------------------------------------------- rows
def _sent_in_bf16(layers: Sequence[int], noise: float = 0.0, tokens: int = 2048) -> TwoRuns:
    cast = model().edited("weight", lambda w, _: rounded(w), layers)
    return TwoRuns(model(), cast, noise=noise, tokens=tokens)


CAST_IN_TRANSFER = Disagreement(
    "router_cast_in_transfer",
    "The transfer from the trainer to the engine rounded the routers to bfloat16; sent in float32, "
    "no token differed.",
    (
        Pair("all layers", partial(_sent_in_bf16, range(3)), "weights rounded", 0),
        Pair(
            "all layers, and noise of 0.03 % on the inputs",
            partial(_sent_in_bf16, range(3), 0.0003),
            "weights rounded",
            0,
        ),
        Pair(
            "the second layer only", partial(_sent_in_bf16, [1], tokens=8192), "weights rounded", 1
        ),
        Pair("sent in float32", _equal, "no disagreement"),
        Pair("noise of 0.2 % on the inputs instead", noisy),
    ),
    threads=("PrimeIntellect-ai/prime-rl#3524",),
)


def _quantised(bits: int, is_named: bool) -> TwoRuns:
    other = softmax_model(layers=3)
    coarse = other.edited("weight", lambda w, _: quantised(w, bits, 128))
    return TwoRuns(other, coarse, against=coarse if is_named else None, noise=0.0005)


def _int8_by_127() -> TwoRuns:
    """Rows as codes times a scale by row, multiplied out in float32."""

    def rows(weight: Array, layer: int) -> Array:
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127.0)
        return np.rint(weight / scale) * scale

    return TwoRuns(model(), model().edited("weight", rows))


QUANTISED = Disagreement(
    "router_quantised",
    "A quantiser took the router for one more linear layer. Where the scheme is on the list the "
    "choices tell; else the quantised checkpoint is named with --checkpoint-b.",
    (
        Pair("int8, scale amax / 127", _int8_by_127, "weights rounded", 0),
        Pair("int4, scale amax / 7", partial(_quantised, 4, False), "weights rounded", 0),
        Pair("int4, named", partial(_quantised, 4, True), "weights rounded", 0),
        Pair("int2, named", partial(_quantised, 2, True), "router stale", 0),
        Pair("int2, not named", partial(_quantised, 2, False), "inconclusive"),
        Pair("the original named", lambda: TwoRuns(model(), against=model(), noise=0.002)),
    ),
    threads=("huggingface/transformers#48801",),
)


def _smoothed(spread: float) -> TwoRuns:
    other = smoothed(softmax_model(layers=3), spread, is_followed=False)
    return TwoRuns(softmax_model(layers=3), other, against=other)


def _followed() -> TwoRuns:
    """Scales that are powers of two, so that nothing is rounded on either side."""

    def scales(layer: int, size: int) -> Array:
        return 2.0 ** np.random.default_rng([2451, layer]).integers(-2, 3, size)

    plain = softmax_model(layers=3)
    divided = plain.edited("gain", lambda g, layer: g / scales(layer, g.size))
    other = divided.edited("weight", lambda w, layer: w * scales(layer, w.shape[1]))
    return TwoRuns(plain, other, against=other)


SMOOTHED = Disagreement(
    "gain_smoothed_alone",
    "AWQ and SmoothQuant divided the gain of the norm in front by a scale that the router did not "
    "follow; the exported checkpoint is named with --checkpoint-b.",
    (
        Pair("scales between 1/1.2 and 1.2", partial(_smoothed, 1.2), "gain not folded", 0),
        Pair("scales between 1/3 and 3", partial(_smoothed, 3.0), "gain not folded", 0),
        Pair("the router followed", _followed, "no disagreement"),
    ),
    threads=("vllm-project/llm-compressor#2451", "vllm-project/llm-compressor#1455"),
)


def _without_gain() -> TwoRuns:
    spread = softmax_model(layers=3).edited(
        "gain", lambda g, layer: g * np.random.default_rng(layer).uniform(0.5, 1.5, g.size)
    )
    return TwoRuns(spread, spread.edited("gain", lambda g, _: np.ones_like(g)))


GAIN_LEFT_OUT = Disagreement(
    "gain_left_out",
    "An engine folds the gain of the norm into the experts and forgets the router.",
    (
        Pair("gains between 0.5 and 1.5", _without_gain, "gain not folded", 0),
        Pair("folded into the router too", _equal, "no disagreement"),
    ),
)


def moved(share: float) -> Checkpoint:
    def rows(weight: Array, layer: int) -> Array:
        noise = np.random.default_rng([9, layer]).standard_normal(weight.shape)
        return weight + share * noise / np.sqrt(weight.shape[1])

    return model().edited("weight", rows)


def _stale(share: float) -> TwoRuns:
    return TwoRuns(model(), moved(share), against=moved(share), noise=0.001)


def _merged() -> TwoRuns:
    def copied(weight: Array, _: int) -> Array:
        return np.where(np.arange(len(weight))[:, None] == 9, weight[3], weight)

    merged = model().edited("weight", copied, (1,))
    return TwoRuns(model(), merged, against=merged, noise=0.001)


ANOTHER_REVISION = Disagreement(
    "router_of_another_revision",
    "The engine kept the routers of an earlier step, or of another revision; that checkpoint is "
    "named with --checkpoint-b.",
    (
        Pair("rows moved by 2 % of their length", partial(_stale, 0.02), "router stale", 0),
        Pair("rows moved by 20 %", partial(_stale, 0.2), "router stale", 0),
        Pair("a merge gave two experts of the second layer one row", _merged, "router stale", 1),
        Pair(
            "the earlier step named, the right one loaded",
            lambda: TwoRuns(model(), against=moved(0.2), noise=0.002),
        ),
    ),
)


def _rounding(engine: Engine) -> Runs:
    return lambda: TwoRuns(model(), engine=engine)


ROUNDED_ON_THE_WAY = Disagreement(
    "rounded_on_the_way",
    "The engine computes the router in bfloat16: its inputs, or the logits it compares.",
    (
        Pair("logits rounded", _rounding(Engine(logits=bf16)), "logits rounded", 0),
        Pair("inputs rounded", _rounding(Engine(inputs=bf16)), "inputs rounded", 0),
        Pair(
            "inputs and weights rounded",
            _rounding(Engine(inputs=bf16, weight=bf16)),
            "inputs rounded",
            0,
        ),
        Pair("noise of 0.2 % on the inputs instead", noisy),
    ),
)


# ------------------------------------------------------------------------------- biases and rules
def _favoured(logits: Array) -> Array:
    """Every expert's logit and a number of its own."""
    added = np.random.default_rng(3).standard_normal(logits.shape[1])
    return logits + (0.4 * logits.std() * added).astype(np.float32)


EXPERTS_FAVOURED = Disagreement(
    "experts_favoured",
    "The engine kept a term that balances experts, which training had switched off: it adds a "
    "number to each expert's logit, in a model that has no bias.",
    (
        Pair(
            "a number for each expert",
            _rounding(Engine(logits=_favoured)),
            "experts favoured otherwise",
            0,
        ),
        Pair("noise of 0.2 % on the inputs instead", noisy),
    ),
)


def plain_model() -> Checkpoint:
    """Two layers, 64 experts, no groups: 4 chosen by sigmoid score and bias."""
    return sigmoid_model(layers=2).changed(config={"n_group": 1, "topk_group": 1})


def _glm(offset: float, engine: Engine, noise: float = 0.0, tokens: int = 1024) -> Runs:
    return lambda: TwoRuns(glm_model(offset), engine=engine, noise=noise, tokens=tokens)


_CAST = Engine(bias=bf16)
_SUM = Engine(bias=bf16, selection=bf16)

BIAS_CAST = Disagreement(
    "bias_collapses_in_bfloat16",
    "The engine cast the selection bias to bfloat16: values that spread 0.25 around 7 became a "
    "dozen.",
    (
        Pair("biases around 1", _glm(1.0, _CAST), "bias rounded", 0),
        Pair("biases around 7", _glm(7.0, _CAST, tokens=512), "bias rounded", 0),
        Pair("around 7, with noise of 0.1 %", _glm(7.0, _CAST, 0.001), "bias rounded", 0),
        Pair("bias kept in float32", _glm(7.0, Engine(), 0.001, 2048)),
        Pair("bias kept in float32, no noise", _glm(7.0, Engine()), "no disagreement"),
    ),
    threads=("sgl-project/sglang#37133",),
)

SUM_ROUNDED = Disagreement(
    "bias_swallows_scores",
    "Score and bias were added up in bfloat16, where a step at the bias is larger than what scores "
    "differ by.",
    (
        Pair("biases around 7", _glm(7.0, _SUM), "bias rounded", 0),
        Pair("biases around 30", _glm(30.0, _SUM), "bias rounded", 0),
        Pair("added up in float32", _glm(30.0, Engine(), 0.0005, 4096)),
    ),
    threads=("sgl-project/sglang#31001",),
)


def biases(scale: float, seed: int) -> Checkpoint:
    def drawn(bias: Array, layer: int) -> Array:
        return bias + scale * np.random.default_rng([seed, layer]).standard_normal(bias.size)

    return plain_model().edited("bias", drawn)


def _old_rows() -> Checkpoint:
    """Before: other rows too, so that only the biases of B are those of this checkpoint."""

    def rows(weight: Array, layer: int) -> Array:
        noise = np.random.default_rng([8, layer]).standard_normal(weight.shape)
        return weight + 0.1 * noise / np.sqrt(weight.shape[1])

    return plain_model().edited("weight", rows)


def _frozen(scale: float) -> TwoRuns:
    return TwoRuns(biases(scale, 1), plain_model(), against=_old_rows(), noise=0.0005, tokens=512)


def _both_sent() -> TwoRuns:
    return TwoRuns(biases(0.1, 1), against=_old_rows(), noise=0.001, tokens=4096)


BIAS_FROZEN = Disagreement(
    "bias_frozen",
    "The rows were sent after every step and the biases only once; the first checkpoint is named "
    "with --checkpoint-b.",
    (
        Pair("biases moved by 0.01", partial(_frozen, 0.01), "bias stale", 0),
        Pair("biases moved by 0.1", partial(_frozen, 0.1), "bias stale", 0),
        Pair("both sent", _both_sent),
    ),
    threads=("PrimeIntellect-ai/prime-rl#2953",),
)


def _zeros() -> TwoRuns:
    return TwoRuns(biases(0.05, 2), engine=Engine(bias=np.zeros_like), noise=0.0005)


BIAS_LEFT_OUT = Disagreement(
    "bias_never_reached_the_engine",
    "The bias that balances the load was zeros on one side: never updated, never converted, or not "
    "loaded.",
    (
        Pair("biases that spread 0.05", _zeros, "bias missing", 0),
        Pair("loaded", lambda: TwoRuns(biases(0.05, 2)), "no disagreement"),
    ),
    threads=("AI-Hypercomputer/maxtext#2494",),
)


def _weighed(engine: Engine, scale: float) -> TwoRuns:
    return TwoRuns(biases(scale, 3), engine=engine, keeps="weights")


_leaking = partial(_weighed, Engine(leaks_bias=True))

BIAS_LEAKS = Disagreement(
    "bias_leaks_into_routing_weights",
    "The bias that should only select was left in the scores that weights are made of: the same "
    "experts, with other weights.",
    (
        Pair("biases that spread 0.1", partial(_leaking, 0.1), "bias in routing weights", 0),
        Pair("biases that spread 0.5", partial(_leaking, 0.5), "bias in routing weights", 0),
        Pair("weights of the scores alone", partial(_weighed, Engine(), 0.5), "no disagreement"),
    ),
    "choices and routing weights of both runs",
    threads=("vllm-project/vllm#12002",),
)


def _groups(engine: Engine, noise: float, tokens: int) -> Runs:
    return lambda: TwoRuns(sigmoid_model(layers=2), engine=engine, noise=noise, tokens=tokens)


_UNGROUPED = Engine(ignores_groups=True)

GROUPS_IGNORED = Disagreement(
    "groups_ignored",
    "The engine chooses from all groups of experts.",
    (
        Pair("1 of 2 groups", _groups(_UNGROUPED, 0.0005, 1024), "rule differs", 0),
        Pair("groups kept", _groups(Engine(), 0.002, 2048)),
    ),
)


# -------------------------------------------------------- places, numbers, padding, and beyond it
def _changed(after: After, noise: float) -> Runs:
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
    "An engine never routes the last token it samples, so that its ids are one row short; filled "
    "up at the wrong end, every row is that of another token.",
    (
        Pair("every document", _changed(_one_row_short, 0.0), "tokens shifted"),
        Pair("with noise of 0.3 %", _changed(_one_row_short, 0.003), "tokens shifted"),
        Pair("filled up at the right end", noisy),
    ),
    threads=("PrimeIntellect-ai/prime-rl#1807",),
)


def _one_layer_down(ids: Array, _: TokenColumns) -> Array:
    return np.roll(ids, 1, axis=0)


LAYERS_SHIFTED = Disagreement(
    "dense_layer_counted",
    "One side counts a dense layer in front and the other does not.",
    (
        Pair("by one layer", _changed(_one_layer_down, 0.001), "layers shifted"),
        Pair("counted alike", noisy),
    ),
)


def _padded(share: float) -> After:
    def after(ids: Array, columns: TokenColumns) -> Array:
        out, length = ids.copy(), int(columns.position.max()) + 1
        out[:, columns.position >= length * (1.0 - share)] = np.arange(ids.shape[2])
        return out

    return after


PADDING = Disagreement(
    "padding_as_experts",
    "Sequences were padded to one length, and the padding holds valid numbers of experts.",
    (
        Pair("2 % of each document", _changed(_padded(0.02), 0.001), "padding counted"),
        Pair("half of each document", _changed(_padded(0.5), 0.001), "padding counted"),
        Pair("no padding", noisy),
    ),
    threads=("radixark/miles#645", "THUDM/slime#1052"),
)


def _renamed(count: int) -> After:
    def after(ids: Array, _: TokenColumns) -> Array:
        numbers = np.arange(32)
        some = np.random.default_rng(5).choice(32, count, replace=False)
        numbers[some] = np.roll(some, 1)
        return numbers[ids].astype(ids.dtype)

    return after


RENAMED = Disagreement(
    "physical_ids",
    "Expert load balancing moves experts to other places, and the ids are those of the places.",
    (
        Pair("two experts", _changed(_renamed(2), 0.001), "experts renamed", 0),
        Pair("all experts", _changed(_renamed(32), 0.001), "experts renamed", 0),
        Pair("logical ids", noisy),
    ),
)


def _at_random(share: float) -> After:
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
    "A race, or a buffer read too early: some tokens get experts that have nothing to do with them.",
    (
        Pair("1 % of the tokens", _changed(_at_random(0.01), 0.001), "beyond noise", 1),
        Pair("10 % of the tokens", _changed(_at_random(0.1), 0.001), "beyond noise", 1),
        Pair("noise of 2 %", partial(noisy, 0.02, 1.0)),
    ),
)


def normal_nats(size: float) -> LogProbs:
    return lambda generator, tokens: size * generator.standard_normal(tokens)


def _scored(nats: float, noise: float) -> Runs:
    return lambda: TwoRuns(model(), noise=noise, log_probs=normal_nats(nats))


def _moved_inputs(noise: float) -> TwoRuns:
    return TwoRuns(model(), noise=noise, keeps="inputs")


NOT_THE_ROUTER = Disagreement(
    "not_the_router",
    "Log-probabilities of trainer and engine drifted apart; routers in float64 did not help, "
    "because the router was not the cause.",
    (
        Pair("0.1 nats, routing alike", _scored(0.15, 0.001), "not the router"),
        Pair("1 nat, routing equal", _scored(1.3, 0.0), "not the router"),
        Pair("inputs that moved by 10 %, recorded", partial(_moved_inputs, 0.1), "not the router"),
        Pair("0.01 nats", _scored(0.01, 0.002)),
        Pair("inputs that moved by 0.3 %, recorded", partial(_moved_inputs, 0.003)),
    ),
    "choices and log-probabilities of both runs",
    threads=("NVIDIA-NeMo/RL#4243", "sgl-project/sglang#18213", "PrimeIntellect-ai/prime-rl#3583"),
)


def _drawn(ids: Array, _: TokenColumns) -> Array:
    """Any experts for every token."""
    generator = np.random.default_rng(8)
    return generator.random((*ids.shape[:2], 32)).argsort(axis=2)[..., : ids.shape[2]]


def _other_model() -> TwoRuns:
    """B ran, and says that it ran, a model whose rows are others."""

    def drawn(weight: Array, layer: int) -> Array:
        rows = np.random.default_rng([9, layer]).standard_normal(weight.shape)
        return (rows * weight.std()).astype(np.float32)

    return TwoRuns(model(), model().edited("weight", drawn), names_fingerprints=True)


NOT_OF_THIS_MODEL = Disagreement(
    "not_of_this_model",
    "The file of the other run was of another model, or no choices at all.",
    (
        Pair("a recording that names another checkpoint", _other_model, "another checkpoint"),
        Pair("any experts for every token", _changed(_drawn, 0.0), "unrelated"),
        Pair("recorded from this model", noisy),
    ),
)
