"""Healthy routers of many shapes, drawn by number: as different as trained ones are."""

import numpy as np

from tests.museum.checkpoint import BF16, F32, Checkpoint
from tests.museum.healthy import sigmoid_model, softmax_model

#: Experts, chosen ones and inputs of a layer: from small models to DeepSeek's 256 experts. A bias
#: needs groups of 32.
_EXPERTS, _HIDDEN, _LAYERS = (8, 16, 32, 60, 64, 128, 160, 256), (64, 128, 256, 512), (1, 2, 3, 9)

#: The largest share of directions that rows have in common, spread of their lengths, spread of the
#: gain, and factor of its few outlying columns.
_SHARED, _LENGTHS, _GAIN, _OUTLIERS = 0.7, 0.4, 0.5, 4.0


def drawn_shape(number: int) -> Checkpoint:
    """The healthy model of that number, as different from others as trained ones are."""
    random = np.random.default_rng([400, number])
    has_bias = bool(random.integers(2))
    experts = int(random.choice([e for e in _EXPERTS if not has_bias or e % 32 == 0]))
    hidden, layers = int(random.choice(_HIDDEN)), int(random.choice(_LAYERS))
    make = sigmoid_model if has_bias else softmax_model
    model = make.__wrapped__(layers, experts, hidden)
    shared, lengths, gain = random.uniform(0.0, (_SHARED, _LENGTHS, _GAIN))
    outliers = random.uniform(1.0, _OUTLIERS)
    rank, tails = int(random.integers(4, 17)), random.uniform(6.0, 30.0)

    def rows(weight: np.ndarray, layer: int) -> np.ndarray:
        own = np.random.default_rng([401, number, layer])
        count = weight.shape[1]
        heavy = own.standard_t(tails, weight.shape) / np.sqrt(count * tails / (tails - 2.0))
        directions = own.standard_normal((rank, count)) / np.sqrt(count * rank)
        together = own.standard_normal((experts, rank)) @ directions
        together += own.standard_normal(count) / np.sqrt(count)
        mixed = np.sqrt(1.0 - shared**2) * heavy + shared * together
        return mixed * np.exp(own.normal(0.0, lengths, (experts, 1)) + 0.02 * layer)

    def gains(values: np.ndarray, layer: int) -> np.ndarray:
        of_all, own = (np.random.default_rng([402, number, *at]) for at in ((), (layer,)))
        found = np.exp(of_all.normal(0.0, gain, values.shape) + own.normal(0.0, 0.1, values.shape))
        found[of_all.choice(len(found), 2, replace=False)] *= outliers
        return found

    chosen = int(random.integers(1, min(experts // 2, 8) + 1))
    dtype = F32 if random.integers(2) else BF16
    said = {
        "num_experts_per_tok": chosen,
        "dtype": "float32" if dtype == F32 else "bfloat16",
        "initializer_range": 0.02,
    }
    shaped = model.changed(config=said).edited("weight", rows, dtype=dtype).edited("gain", gains)
    if not has_bias:
        return shaped
    spread = 10.0 ** random.uniform(-2.5, -1.0)
    return shaped.edited(
        "bias",
        lambda bias, layer: (
            spread * np.random.default_rng([403, number, layer]).standard_normal(bias.shape)
        ),
    )
