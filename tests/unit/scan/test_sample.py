"""A sample of tokens: which are drawn, the same however the work is cut; those that are not finite end
the run by name, or are left out and counted. What is measured of samples: ties, recorded outputs.
"""

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from moegeom.core.errors import NonFiniteError, RecordingError
from moegeom.core.router import Rule
from moegeom.core.tokens import TILE
from moegeom.engine import choice
from moegeom.engine.request import ComputeOptions
from moegeom.engine.sample import draw_sample, drawn_tokens, finite_tokens
from moegeom.geometry.selection import route
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from tests.array_source import ArraySource
from tests.unit.scan import made
from tests.unit.scan.made import SOFTMAX, normal_rows, router_with, row_of

TOKENS = 9 * TILE + 100
SKIP = ComputeOptions(non_finite="skip")


@pytest.fixture(scope="module")
def source():
    return made.recording(TOKENS)


def test_a_sample_is_the_same_for_all_routers_and_follows_the_seed(source):
    first, again, other = (
        drawn_tokens(source, ComputeOptions(seed=seed), 64) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == 64
    assert (first != other).any()
    np.testing.assert_array_equal(drawn_tokens(source, ComputeOptions()), np.arange(TOKENS))


def test_first_tokens_of_documents_are_never_drawn(source):
    options = ComputeOptions(exclude_first=40)
    drawn = drawn_tokens(source, options, 300)
    assert len(drawn) == 300
    assert (source.columns.position[drawn] >= 40).all()
    with pytest.raises(RecordingError, match="--exclude-first 97 leaves none of the 9,316 tokens"):
        drawn_tokens(source, ComputeOptions(exclude_first=97), 300)


def test_quantities_are_those_of_the_definition_at_the_tokens_named(source):
    at, router = np.array([3, TILE - 1, TILE, 5 * TILE + 7]), made.router()
    names = ("input", "chosen", "document", "group_margin")
    sample = draw_sample(router, source, ComputeOptions(), names, at=at)
    np.testing.assert_array_equal(sample.token, at)
    np.testing.assert_array_equal(sample.inputs, source.values[at])
    expected = route(source.values[at] @ router.weight.T, router.rule).chosen
    np.testing.assert_array_equal(sample.chosen, expected)
    np.testing.assert_array_equal(sample.document, at // 97)
    assert sample.group_margin is None  # a rule without groups


def test_tokens_that_are_not_finite_are_refused_by_name_or_left_out_and_counted():
    source, router = made.recording(TOKENS), made.router()
    source.values[[5, 6000]] = np.nan
    with pytest.raises(NonFiniteError, match=r"2 of 9316 tokens.*first: token 5\)"):
        draw_sample(router, source, ComputeOptions(), ("chosen",))
    sample = draw_sample(router, source, SKIP, ("chosen",))
    assert sample.num_non_finite == 2
    np.testing.assert_array_equal(sample.token, np.setdiff1d(np.arange(TOKENS), [5, 6000]))
    with pytest.raises(NonFiniteError):  # nothing would be left
        draw_sample(router, source, SKIP, ("chosen",), at=np.array([5]))
    token, names = np.array([4, 5, 6, 6000]), source.facts.routers
    np.testing.assert_array_equal(finite_tokens(source, names, token, SKIP), [4, 6])
    with pytest.raises(NonFiniteError, match="first: token 5"):
        finite_tokens(source, names, token, ComputeOptions())


FEW_TOKENS = 3 * TILE + 50
BAD = [7, TILE - 1, TILE, 3 * TILE + 49]


@pytest.fixture(params=[np.nan, np.inf, -np.inf, 3e38])
def damaged(request):
    """A recording with four bad tokens; inputs of 3e38 are finite and overflow in the product."""
    source, value = made.recording(FEW_TOKENS), np.float32(request.param)
    is_huge = np.isfinite(value)
    source.values[BAD] = np.sign(made.router().weight[0]) * value if is_huge else 1.0
    if not is_huge:
        source.values[BAD, 0] = value
    return source


@pytest.mark.parametrize(("num_workers", "batch_tokens"), [(1, 10 * TILE), (2, TILE)])
def test_the_first_bad_token_is_named(damaged, num_workers, batch_tokens):
    with pytest.raises(NonFiniteError, match=r"recorded: .* router text/0 .*first: token 7\)"):
        made.measured(damaged, num_workers=num_workers, batch_tokens=batch_tokens)


def test_left_out_they_are_counted_and_change_nothing_else(damaged):
    good = np.setdiff1d(np.arange(FEW_TOKENS), BAD)
    metrics = [METRICS["tokens"], METRICS["load"]]
    measured = measure_router(made.run(damaged, non_finite="skip", metrics=metrics))
    facts = measured.facts
    assert (facts["num_non_finite"], facts["num_tokens"]) == (4, len(good))
    np.testing.assert_array_equal(facts["first_non_finite"], BAD)
    logits = made.inputs(FEW_TOKENS)[good] @ made.router().weight.T
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    slots = [row["num_slots"] for row in made.rows_of(made.tables(measured)["experts"])]
    np.testing.assert_array_equal(slots, np.bincount(chosen.reshape(-1), minlength=12))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_without_any_good_token_everything_measured_is_null(kind):
    source = made.recording(300)
    source.values[:] = np.nan
    measured = measure_router(made.run(source, made.router(kind), non_finite="skip"))
    # more bad tokens than are listed are all counted
    assert measured.facts["num_non_finite"] == 300
    np.testing.assert_array_equal(measured.facts["first_non_finite"], np.arange(8))
    row = made.row_of(made.tables(measured)["layers"])
    columns = ("load_cv_ddof0", "max_vio_global", "margin_p50", "expert_set_coverage", "gini")
    assert {row[name] for column in columns for name in (column, f"{column}_se")} == {None}
    # what needs no tokens is still there
    assert row["num_tokens"] == row["num_zero_rows"] == 0


# --------------------------------------------------------------------------------- recorded outputs
EXPERTS, HIDDEN, OUTPUT_TOKENS = 6, 8, 1536
NAME = "text/0"
OUTPUT_ROUTER = router_with(normal_rows(EXPERTS, HIDDEN), Rule(2, "softmax", SOFTMAX))


def outputs(**changes):
    """A shared expert that is affine in the input, routed experts that are not, all experts."""
    random = np.random.default_rng(1)
    inputs = random.standard_normal((OUTPUT_TOKENS, HIDDEN)).astype(np.float32)
    shared = inputs @ random.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) + 2
    routed = np.sin(3 * inputs) * np.float32(0.5)
    every = random.standard_normal((OUTPUT_TOKENS, EXPERTS, HIDDEN)).astype(np.float32)
    every[:, 3] = every[:, 1]
    made = {"shared_output": shared, "routed_output": routed, "expert_output": every} | changes
    return inputs, {kind: {NAME: values} for kind, values in made.items()}


def layer(inputs, kinds) -> dict:
    source = ArraySource({NAME: inputs}, document_tokens=32, outputs=kinds)
    metrics = [METRICS[name] for name in ("tokens", "output_energy", "output_overlap")]
    return row_of(measure_router(RouterRun(OUTPUT_ROUTER, source, metrics)).rows["layers"])


@pytest.fixture(scope="module")
def measured():
    """The outputs by kind, in float64, and what is measured of them."""
    inputs, kinds = outputs()
    return (
        inputs,
        {kind: of[NAME].astype(float) for kind, of in kinds.items()},
        layer(inputs, kinds),
    )


def test_energy_and_overlap_are_those_of_the_arrays(measured):
    _, kinds, row = measured
    shared, routed = kinds["shared_output"], kinds["routed_output"]
    energy = ((shared + routed) ** 2).sum()
    np.testing.assert_allclose(row["shared_energy_share"], (shared**2).sum() / energy, 1e-6)
    np.testing.assert_allclose(row["routed_energy_share"], (routed**2).sum() / energy, 1e-6)
    mean = (shared.mean(axis=0) ** 2).sum() / (shared**2).sum(axis=1).mean()
    np.testing.assert_allclose(row["shared_mean_energy_share"], mean, 1e-6)
    assert row["shared_mean_cosine"] > 0.99
    _, kinds, row = measured
    i, j = np.triu_indices(EXPERTS, 1)
    expected = np.mean([cosine_similarity(token)[i, j] for token in kinds["expert_output"]])
    np.testing.assert_allclose(row["overlap_output"], expected, rtol=1e-6)
    np.testing.assert_allclose(row["max_output_cosine"], 1.0, rtol=1e-6)


def test_outputs_of_another_model_or_too_large_for_the_memory_are_refused(monkeypatch):
    wide, few = (
        np.zeros((OUTPUT_TOKENS, *shape), np.float32) for shape in ((HIDDEN + 1,), (5, HIDDEN))
    )
    with pytest.raises(RecordingError, match="9 columns.* has 8"):
        layer(*outputs(shared_output=wide))
    with pytest.raises(RecordingError, match="5 experts.* has 6"):
        layer(*outputs(expert_output=few))
    monkeypatch.setattr(choice, "OUTPUT_BYTES", 2**16)
    with pytest.raises(RecordingError, match="GiB"):
        layer(*outputs())


def test_without_outputs_the_reason_is_said():
    run = RouterRun(OUTPUT_ROUTER, ArraySource({NAME: outputs()[0]}), [METRICS["output_energy"]])
    assert "no outputs" in measure_router(run).facts["reasons"]["output_energy"]
