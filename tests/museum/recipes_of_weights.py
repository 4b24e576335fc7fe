"""Recipes of weights: biases and rows that one side lacks, or has from elsewhere."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from tests.museum.checkpoint import Checkpoint, rounded
from tests.museum.disagreements import biases, model, moved, normal_nats, plain_model
from tests.museum.healthy import sigmoid_model
from tests.museum.questions import Compared, SignedOff
from tests.museum.recipe import Planted, Recipe
from tests.museum.recipes_of_rules import live_biases, of_runs
from tests.museum.two_runs import Array, Runs, TwoRuns, Where

F8 = np.dtype(ml_dtypes.float8_e4m3fn)


# ------------------------------------------------------------------------------------------- biases
def without_bias() -> Checkpoint:
    return plain_model().edited("bias", lambda bias, _: np.zeros_like(bias))


def _not_saved(spread: float) -> Runs:
    return lambda: TwoRuns(without_bias(), live_biases(spread), noise=0.0005)


BIAS_NOT_SAVED = of_runs(
    "live_bias_not_saved",
    ("pytorch/torchtitan#1226", "pytorch/torchtitan#1222"),
    "The update of the bias made a new tensor: the run balanced its load with it, and every "
    "checkpoint that was saved held zeros.",
    "A's biases are 0, and B routes with live ones.",
    "B routes with a bias that the checkpoint lacks.",
    "bias differs",
    {
        "biases that spread 0.01": _not_saved(0.01),
        "biases that spread 0.05": _not_saved(0.05),
        "biases that spread 0.2": _not_saved(0.2),
    },
    {"zeros on both sides": lambda: TwoRuns(without_bias(), noise=0.002)},
)


def _before_loading(layers: tuple[int, ...], noise: float = 0.0) -> Runs:
    """Bytes that lay there: tiny, large, and zeros."""

    def left_over(bias: Array, layer: int) -> Array:
        generator = np.random.default_rng([10440, layer])
        size = 10.0 ** generator.uniform(-12.0, 2.0, bias.size)
        values = generator.choice([-1.0, 1.0], bias.size) * size
        return np.where(generator.random(bias.size) < 0.5, 0.0, values)

    def runs() -> TwoRuns:
        a = biases(0.05, 2)
        return TwoRuns(a, a.edited("bias", left_over, layers), noise=noise)

    return runs


BIAS_BEFORE_LOADING = of_runs(
    "bias_taken_before_loading",
    ("sgl-project/sglang#10440",),
    "A layer kept the bias tensor that it saw when it was built, before the checkpoint was loaded: "
    "whatever lay in that memory.",
    "Half of B's biases are 0 and the others have any size between 1e-12 and 100.",
    "B routes with another bias.",
    "bias differs",
    {
        "the second of two layers": _before_loading((1,)),
        "both layers": _before_loading((0, 1)),
        "both, with noise of 0.2 %": _before_loading((0, 1), 0.002),
    },
    {"taken after loading": lambda: TwoRuns(biases(0.05, 2), noise=0.002)},
)


# --------------------------------------------------------------------------------------------- rows
def _first(positions: int) -> Where:
    return lambda columns: columns.position < positions


def _documents(numbers: Sequence[int]) -> Where:
    return lambda columns: np.isin(columns.document, numbers)


def _partly_stale(share: float, where: Where, log_probs: float | None = None) -> Runs:
    """Tokens of ``where`` were routed by rows that moved by a share; these are named."""
    other = lambda: moved(share)
    nats = None if log_probs is None else normal_nats(log_probs)
    return lambda: TwoRuns(
        model(), other(), where=where, against=other(), noise=0.0005, log_probs=nats
    )


def _named_not_loaded() -> TwoRuns:
    return TwoRuns(model(), against=moved(0.05), noise=0.002)


PREFIX_REROUTED = of_runs(
    "prefix_routed_by_newer_weights",
    ("radixark/miles#3277",),
    "A request was taken back and resumed after an update: the routes of its beginning were "
    "computed anew by the new weights, and joined to log-probabilities of the old ones.",
    "The first positions of B are routed by rows that moved; log-probabilities are A's.",
    "B routes with the other checkpoint up to a position.",
    "router stale",
    {
        "16 of 128 positions, rows moved by 5 %": _partly_stale(0.05, _first(16), 0.005),
        "64 positions, 5 %": _partly_stale(0.05, _first(64), 0.005),
        "64 positions, 20 %": _partly_stale(0.2, _first(64), 0.005),
    },
    {"the other checkpoint named, but not loaded": _named_not_loaded},
    told="position",
    needs="choices and log-probabilities of both runs",
)

REQUESTS_STALE = of_runs(
    "requests_served_by_the_base",
    ("radixark/miles#1724",),
    "One of several engines was restarted and served the base checkpoint: some requests came from "
    "weights that nobody trained.",
    "Some documents of B are routed by rows that moved by 20 %.",
    "B routes with the other checkpoint in these documents.",
    "router stale",
    {
        "1 of 16 documents": _partly_stale(0.2, _documents([5])),
        "2 documents": _partly_stale(0.2, _documents([5, 11])),
        "8 documents": _partly_stale(0.2, _documents(range(8))),
    },
    {"the other checkpoint named, but not loaded": _named_not_loaded},
    told="document",
)


def _in_fp8(layers: tuple[int, ...], noise: float = 0.0) -> Runs:
    def cast(weight: Array, _: int) -> Array:
        scale = np.abs(weight).max() / float(ml_dtypes.finfo(F8).max)
        return rounded(weight / scale, F8) * scale

    return lambda: TwoRuns(model(), model().edited("weight", cast, layers), noise=noise)


ROLLOUT_IN_FP8 = of_runs(
    "router_quantised_for_rollout",
    ("verl-project/verl#5107",),
    "The rollout engine quantised every linear layer to float8 when it received the weights, the "
    "routers among them.",
    "B's rows went through float8 e4m3 with one scale for the tensor.",
    "B's rows are rounded.",
    "weights rounded",
    {
        "the second of three layers": _in_fp8((1,)),
        "all layers": _in_fp8((0, 1, 2)),
        "all layers, with noise of 0.2 %": _in_fp8((0, 1, 2), 0.002),
    },
    {"routers left alone": lambda: TwoRuns(model(), noise=0.002)},
)


# ------------------------------------------------------------------------------ pruned and updated
def kept(per_group: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Experts that stay of two groups of 32, in order."""
    generator = np.random.default_rng([2828, seed])
    chosen = [32 * g + generator.choice(32, n, replace=False) for g, n in enumerate(per_group)]
    return np.sort(np.concatenate(chosen))


def pruned(rows: np.ndarray, of_bias: np.ndarray) -> Checkpoint:
    """The model with these rows and these biases, and a config that says how many."""
    small = sigmoid_model().edited("weight", lambda weight, _: weight[rows])
    small = small.edited("bias", lambda bias, _: bias[of_bias])
    return small.changed(config={"n_routed_experts": len(rows)})


def _signed(rows: np.ndarray, of_bias: np.ndarray) -> Callable[[], SignedOff]:
    return lambda: SignedOff(sigmoid_model(), pruned(rows, of_bias))


_EVEN, _UNEVEN = kept((24, 24)), kept((18, 30))

PRUNED = Recipe(
    "experts_pruned",
    ("vllm-project/llm-compressor#2828", "egesabanci/reap-mlx#93"),
    "Experts were pruned by how little they matter; rows, biases and experts must be the same "
    "choice of the old ones, and as many in each group.",
    "48 of 64 experts stay; what goes wrong is which biases stay, or how many of each group.",
    "Rows that stay are told by their old numbers, and what does not fit them fails.",
    "signoff",
    "both checkpoints",
    (
        Planted("18 of one group and 30 of the other", _signed(_UNEVEN, _UNEVEN), ("failed",),
                "group"),
        Planted("the first 48 biases stay", _signed(_EVEN, np.arange(48)), ("failed",),
                "bias.*(other|left behind|not those)"),
        Planted("another choice of biases than of rows", _signed(_EVEN, kept((24, 24), 1)),
                ("failed",), "bias.*(other|left behind|not those)"),
    ),
    (
        Planted("rows and biases of the same 24 experts of each group", _signed(_EVEN, _EVEN),
                ("passed", "inconclusive"), "pruned|subset"),
    ),
)  # fmt: skip


def updated(rank: int | None, size: float) -> Checkpoint:
    """Every router plus an update of a rank (None: full), of a size relative to the rows."""

    def merged(weight: Array, layer: int) -> Array:
        generator = np.random.default_rng([1834, layer])
        experts, hidden = weight.shape
        if rank is None:
            update = generator.standard_normal(weight.shape)
        else:
            left = generator.standard_normal((experts, rank))
            update = left @ generator.standard_normal((rank, hidden))
        return weight + size * np.linalg.norm(weight) / np.linalg.norm(update) * update

    return model().edited("weight", merged)


def _updated(rank: int | None, size: float) -> Callable[[], Compared]:
    return lambda: Compared(model(), updated(rank, size))


LOW_RANK_UPDATE = Recipe(
    "low_rank_update",
    ("NVIDIA-NeMo/Megatron-Bridge#1834", "NVIDIA-NeMo/Megatron-Bridge#3072",
     "NovaSky-AI/SkyRL#1776"),
    "LoRA on routers takes a way of its own through the merge; where it was lost, the run learned "
    "nothing, and whether it is in the merged checkpoint is the first question.",
    "Every router of B is A's plus a product of two thin matrices.",
    "The rows moved in as many directions as the update has.",
    "diff",
    "both checkpoints",
    (
        Planted("rank 1, 2 % of the rows", _updated(1, 0.02), (), "rank"),
        Planted("rank 4, 5 %", _updated(4, 0.05), (), "rank"),
        Planted("rank 8, 20 %", _updated(8, 0.2), (), "rank"),
    ),
    (
        Planted("an update of full rank, 2 %", _updated(None, 0.02), ("noise",)),
        Planted("of full rank, 5 %", _updated(None, 0.05), ("noise",)),
    ),
)  # fmt: skip
