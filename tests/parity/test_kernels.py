"""Every kernel of every backend gives what the reference gives, within its stated tolerance.

One parametrised test over ``moegeom.kernels.table.KERNELS``: a new kernel needs an entry in
``ARGUMENTS``, a new backend nothing. ``cuda`` runs on a device; ``emulated`` runs the same sources
and the same Python around them on the processor, so that what they compute is tested everywhere.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import cones_of, row_distances
from moegeom.geometry.histogram import NUM_BINS, bin_edges
from moegeom.geometry.rounding import row_spreads
from moegeom.geometry.selection import margin, route
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.kernels.table import BACKENDS, KERNELS, device_kernels, load_kernels
from tests.by_day import IS_NIGHT, by_day
from tests.emulator.emulated_device import EmulatedDevice

#: (tokens, experts, k)
SHAPES = [(1, 2, 1), (12, 5, 2), (5, 5, 5), (16, 64, 8), (8, 256, 8), (6, 64, 1), (6, 16, 15)]
KINDS = "float32 float64 ties zeros equal_rows huge denormal strided fortran".split()
SCORES = ("identity", "softmax", "sigmoid", "sqrt_softplus")
INF = np.inf


@dataclass(frozen=True)
class Case:
    """Values to run a kernel on."""

    tokens: int
    experts: int
    k: int
    values: str

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng([self.tokens, self.experts, self.k])

    def logits(self) -> np.ndarray:
        """[tokens, experts] as the kind of values says; finite."""
        drawn = self.random.standard_normal((self.tokens, self.experts)).astype(np.float32)
        match self.values:
            case "float64":
                return drawn.astype(np.float64) * (1 + 2.0**-40)
            case "ties":
                signs = self.random.choice(np.float32([-1.0, 1.0]), drawn.shape)
                return np.rint(drawn) * signs  # -0.0 and 0.0 among them
            case "zeros":
                return np.where(drawn < 0, np.float32(-0.0), np.float32(0.0))
            case "equal_rows":
                return np.broadcast_to(drawn[:1], drawn.shape).copy()
            case "huge":
                return drawn * np.float32(1e30)
            case "denormal":
                return drawn * np.float32(1e-43)
            case "strided":
                return np.repeat(drawn, 2, axis=1)[:, ::2]
            case "fortran":
                return np.asfortranarray(drawn)
        return drawn

    def chosen(self) -> np.ndarray:
        order = np.argsort(-self.logits(), axis=1, kind="stable")[:, : self.k].astype(np.int32)
        return np.asfortranarray(order) if self.values in ("strided", "fortran") else order

    def labels(self) -> list[np.ndarray]:
        """Population and block of each token."""
        return [self.random.integers(0, n, self.tokens).astype(np.int32) for n in (3, NUM_BLOCKS)]


def _masked(case: Case) -> np.ndarray:
    """Selection scores as a group mask leaves them: most of them -inf."""
    scores = case.logits().astype(np.float64)
    scores[case.random.random(scores.shape) < 0.6] = -INF
    return scores


def top_k(case: Case) -> list[tuple]:
    logits = case.logits()
    some_infinite = np.where(_masked(case) == -INF, np.float32(-INF), logits.astype(np.float32))
    return [(logits, case.k), (_masked(case), case.k), (some_infinite, case.k)]


def input_norm(case: Case) -> list[tuple]:
    values = case.logits()
    bad = values.copy()
    bad[0, 0], bad[-1, -1] = np.nan, INF
    return [(values,), (np.zeros_like(values),), (bad,)]


def selection_scores(case: Case) -> list[tuple]:
    bias = case.random.standard_normal(case.experts)
    return [(case.logits(), name, b) for name in SCORES for b in (bias, np.zeros(case.experts))]


def group_mask(case: Case) -> list[tuple]:
    scores = case.logits().astype(np.float64)
    groups = [g for g in (1, 2, 4, 5, case.experts) if case.experts % g == 0]
    sizes = dict.fromkeys((g, n) for g in groups for n in (1, max(g // 2, 1), g))
    kinds = itertools.product(("max", "top2_sum"), (0.0, -INF))
    return [(scores, GroupMask(*size, *kind)) for size, kind in itertools.product(sizes, kinds)]


def boundary_distance(case: Case) -> list[tuple]:
    weight = case.random.standard_normal((case.experts, 6))
    duplicates, zeros = weight.copy(), weight.copy()
    duplicates[-1], zeros[0] = duplicates[0], 0.0
    bias = np.arange(case.experts) * 0.5
    plain = [row_distances(rows) for rows in (weight, duplicates, zeros)]
    biased = [row_distances(rows, bias) for rows in (duplicates, weight * 0)]
    logits, chosen = case.logits(), case.chosen()
    gap = margin(logits, case.k)
    full = [(logits, chosen, gap, rows, True) for rows in plain + biased]
    return [*full, (logits, chosen, gap, plain[0], False)]


def distance_bracket(case: Case) -> list[tuple]:
    brackets = []
    for m in dict.fromkeys((min(case.k + 1, case.experts), (case.k + case.experts) // 2 + 1)):
        for _, chosen, gap, rows, _ in boundary_distance(case)[:-1]:
            order = np.argsort(-case.logits(), axis=1, kind="stable")[:, :m].astype(np.int32)
            order = case.random.permuted(order, axis=1)  # known in any order
            some = np.take_along_axis(case.logits(), order, axis=1), order
            if case.values == "fortran":
                some = map(np.asfortranarray, some)
            brackets += [(*some, chosen, gap, rows)]
    return brackets


def curved_distance(case: Case) -> list[tuple]:
    groups = 4 if case.experts % 4 == 0 else case.experts
    kept = max(groups // 2, -(-case.k * groups // case.experts))
    bias = 0.2 * case.random.standard_normal(case.experts)
    weights = Weights("scores")
    rules = [
        (Rule(case.k, "sigmoid", weights, True), bias),
        (Rule(case.k, "sigmoid", weights, True), np.zeros(case.experts)),
        (Rule(case.k, "sqrt_softplus", weights, True, logit_map=LogitMap(0.5, 3.0)), bias),
        (Rule(case.k, "softmax", weights, True), 0.05 * bias),
        *(
            (Rule(case.k, score, weights, True, groups=GroupMask(groups, kept, rank, fill)), added)
            for score, rank, fill, added in (
                ("sigmoid", "top2_sum", -INF, bias),
                ("sqrt_softplus", "max", 0.0, bias - 0.8),
                ("identity", "top2_sum", 0.0, bias),
                ("softmax", "max", 0.0, 0.0 * bias),
                ("softmax", "top2_sum", -INF, 0.05 * bias),
            )
        ),
    ]
    weight = case.random.standard_normal((case.experts, 6))
    weight[-1] = weight[0]
    # hairs are split where scores are saturated
    logits = case.logits()[: 1 if case.values == "huge" else case.tokens]
    chosen = [route(logits, rule, added).chosen for rule, added in rules]
    rows = [curved_rows(weight, rule, None, added) for rule, added in rules]
    return [(logits, *both) for both in zip(chosen, rows, strict=True)]


def routing_weights(case: Case) -> list[tuple]:
    scores, softmax = "scores", "softmax_of_selected_logits"
    of_scores = [Weights(scores, *more) for more in ((), (True, 1e-20, 2.5), (True, 0.25, 1.5))]
    weights = [*of_scores, Weights(softmax), Weights(softmax, True, 0.5, 2.0)]
    logits, order = case.logits(), case.chosen()
    shuffled = case.random.permuted(order, axis=1)  # with a bias, the first is not the largest
    return [
        (logits, chosen, Rule(case.k, score, w))
        for score, w, chosen in itertools.product(SCORES, weights, (order, shuffled))
        # identity scores of either sign may add up to next to nothing: not a rule of any family
        if not (score == "identity" and w.source == "scores")
    ]


def expert_set_key(case: Case) -> list[tuple]:
    chosen = case.chosen()
    empty = chosen.copy()
    empty[:, 0] = -1
    return [(chosen, case.experts), (empty, case.experts)]


def same_set(case: Case) -> list[tuple]:
    chosen = case.chosen()
    other = case.random.integers(0, case.experts, chosen.shape).astype(np.int32)
    shuffled = case.random.permuted(chosen, axis=1)
    repeated = chosen.copy()
    repeated[:, -1] = repeated[:, 0]
    lists = [chosen, shuffled, other, repeated, chosen[:, :0], np.tile(chosen, (1, 2))]
    return [(chosen, recorded) for recorded in lists]


def count_experts(case: Case) -> list[tuple]:
    chosen = case.chosen()
    chosen[case.random.random(chosen.shape) < 0.2] = -1
    return [(np.ones((3, NUM_BLOCKS, case.experts), np.int64), chosen, *case.labels())]


def count_pairs(case: Case) -> list[tuple]:
    chosen = case.chosen()
    chosen[case.random.random(chosen.shape) < 0.2] = -1
    shape = (NUM_BLOCKS, case.experts, case.experts)
    return [(np.ones(shape, np.int64), chosen, case.labels()[1])]


def num_shared(case: Case) -> list[tuple]:
    chosen = case.chosen()
    other = case.random.permuted(chosen, axis=0)
    other[:, 0] = -1
    return [(chosen, case.random.permuted(chosen, axis=0)), (chosen, other), (other, other)]


def score_statistics(case: Case) -> list[tuple]:
    logits = np.clip(case.logits(), -1e30, 1e30)
    return [(logits, score) for score in SCORES]


def add_scores(case: Case) -> list[tuple]:
    drawn = case.random.random((case.tokens, case.experts))
    scores = [drawn.astype(np.float32), np.asfortranarray(drawn), drawn[:, ::-1]]
    shape = (3, NUM_BLOCKS, case.experts)
    return [(np.ones(shape, np.int64), probability, *case.labels()) for probability in scores]


def rounding_sigmas(case: Case) -> list[tuple]:
    if not np.isfinite(case.logits().astype(np.float64) ** 2).all():
        return []
    logits, chosen, hidden = case.logits(), case.chosen(), 6
    weight = case.random.standard_normal((case.experts, hidden)).astype(logits.dtype)
    values = case.random.standard_normal((case.tokens, hidden)).astype(np.float32)
    sink = values.copy()
    sink[0, 1] = 1000.0
    duplicates = weight.copy()
    duplicates[-1] = duplicates[0]
    drawn = ((values, weight), (values, duplicates), (0 * values, weight), (sink, weight))
    return [(inputs, logits, chosen, row_spreads(rows)) for inputs, rows in drawn]


def boundary_angle(case: Case) -> list[tuple]:
    weight = case.random.standard_normal((case.experts, 6))
    duplicates = weight.copy()
    duplicates[-1] = duplicates[0]
    none, some = np.zeros(case.experts), np.arange(case.experts) * 0.5
    length = case.random.uniform(0.1, 3.0, case.tokens)
    return [
        (case.logits(), case.chosen(), cones_of(rows, bias), length)
        for rows, bias in ((weight, none), (duplicates, none), (weight * 0, none), (weight, some))
    ]


def count_bins(case: Case) -> list[tuple]:
    values = np.abs(case.logits()[:, 0].astype(np.float64))
    corners = case.random.choice([0.0, -0.0, INF, 5e-324, 2.0**-40, 2.0**24, 1.0], case.tokens)
    edges = case.random.choice(bin_edges(), case.tokens)
    return [
        (np.ones((3, NUM_BLOCKS, NUM_BINS), np.int64), drawn, *case.labels())
        for drawn in (values, corners, edges, np.nextafter(edges, 0.0))
    ]


def rounded_inputs(case: Case) -> list[tuple]:
    values = case.logits().astype(np.float32)
    return [(values, lost, np.empty(values.shape, np.float32)) for lost in (13, 16)]


def wide_logits(case: Case) -> list[tuple]:
    values = case.random.standard_normal((case.tokens + 3, 40)).astype(np.float32)
    weight = case.random.standard_normal((case.experts, 40)).astype(np.float32)
    is_wanted = case.random.random((case.tokens, case.experts)) < 0.5
    token = case.random.integers(0, len(values), case.tokens)
    return [(values, token, lost, weight, is_wanted, case.logits()) for lost in (0, 16)]


ARGUMENTS = {
    function.__name__: function
    for function in (
        input_norm,
        rounded_inputs,
        wide_logits,
        selection_scores,
        group_mask,
        top_k,
        boundary_distance,
        distance_bracket,
        curved_distance,
        routing_weights,
        expert_set_key,
        same_set,
        count_experts,
        count_pairs,
        count_bins,
        num_shared,
        score_statistics,
        add_scores,
        rounding_sigmas,
        boundary_angle,
    )
}

#: All kinds of values in all shapes; by day one case for each mechanism.
CASES = by_day(
    [Case(*shape, values) for values in KINDS for shape in SHAPES],
    {
        "one token, of which one expert is chosen": Case(1, 2, 1, "float32"),
        "all experts are chosen": Case(5, 5, 5, "float32"),
        "more experts than threads": Case(8, 256, 8, "float32"),
        "float64": Case(12, 5, 2, "float64"),
        "ties": Case(12, 5, 2, "ties"),
        "zeros of both signs": Case(6, 16, 15, "zeros"),
        "equal rows": Case(12, 5, 2, "equal_rows"),
        "huge": Case(12, 5, 2, "huge"),
        "denormal": Case(6, 16, 15, "denormal"),
        "columns side by side": Case(6, 16, 15, "fortran"),
    },
)

#: Every backend but the reference, by the name of its tests, with what it runs.
UNDER_TEST = [
    pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else [])
    for name in (*BACKENDS[1:], "cuda", "emulated")
]


def kernel_cases(with_reference: bool = True) -> list:
    """Backend and kernel, for each kernel that the backend has; or for those with a reference."""
    return [
        pytest.param(name, kernel, marks=backend.marks, id=f"{name}-{kernel.name}")
        for backend in UNDER_TEST
        for name in backend.values
        for kernel in KERNELS
        if name in BACKENDS or kernel.on_device
        if kernel.rtol is not None or not with_reference
    ]


@functools.cache
def kernels(backend: str):
    if backend in BACKENDS:
        return load_kernels(backend)
    on = {} if backend == "cuda" else {"device": EmulatedDevice()}
    return {name: functools.partial(kernel, **on) for name, kernel in device_kernels().items()}


def run(backend: str, name: str, arguments: tuple) -> list:
    """Results of a kernel; for one that adds to its first argument, that argument."""
    counts = name.startswith(("count_", "add_"))
    arguments = (arguments[0].copy(), *arguments[1:]) if counts else arguments
    with np.errstate(over="ignore", under="ignore"):
        results = kernels(backend)[name](*arguments)
    if counts:
        assert results is None
        return [arguments[0]]
    return list(results) if isinstance(results, tuple) else [results]


def assert_agree(ours, theirs, rtol: float, scale: float) -> None:
    """Equal, or within ``rtol`` of the value and of ``scale``, the size of what was added up."""
    if theirs is None:
        assert ours is None
        return
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if rtol == 0.0:
        assert_array_equal(ours, theirs)
    else:
        assert_allclose(ours, theirs, rtol, atol=rtol * scale)


@pytest.mark.parametrize(("backend", "kernel"), kernel_cases())
def test_the_backend_agrees_with_the_reference(backend, kernel):
    for case in CASES:
        if case.values == "fortran" and backend == "cpu" and not IS_NIGHT:
            continue  # Numba compiles each layout anew
        for arguments in ARGUMENTS[kernel.name](case):
            ours = run(backend, kernel.name, arguments)
            theirs = run("reference", kernel.name, arguments)
            # a bias is added to scores: their difference keeps the rounding of the larger
            scale = float(np.abs(arguments[2]).max()) if kernel.name == "selection_scores" else 0.0
            try:
                for one, other in zip(ours, theirs, strict=True):
                    assert_agree(one, other, kernel.rtol, max(scale, 1e-290))
            except AssertionError as error:
                error.add_note(f"{case}")
                raise


@pytest.mark.parametrize(("backend", "kernel"), kernel_cases(with_reference=False))
def test_a_batch_cut_anywhere_gives_the_same_bits(backend, kernel):
    """Token by token equals all at once: nothing leaks from one token to the next."""
    case, cuts = Case(13, 5, 2, "ties"), [(0, 1), (1, 6), (6, 13)]
    for arguments in ARGUMENTS[kernel.name](case):
        whole = run(backend, kernel.name, arguments)
        if kernel.name.startswith(("count_", "add_")):
            counts = arguments[0]
            for start, stop in cuts:
                part = (counts, *(a[start:stop] for a in arguments[1:]))
                counts = run(backend, kernel.name, part)[0]
            assert_array_equal(counts, whole[0])
            continue
        per_token = [np.shape(a)[:1] == (13,) for a in arguments]
        parts = []
        for start, stop in cuts:
            each = zip(arguments, per_token, strict=True)
            part = tuple(a[start:stop] if is_cut else a for a, is_cut in each)
            parts.append(run(backend, kernel.name, part))
        for i, expected in enumerate(whole):
            if expected is not None:
                assert_array_equal(np.concatenate([part[i] for part in parts]), expected)
