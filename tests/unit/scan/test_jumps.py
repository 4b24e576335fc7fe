"""Jumps in the tables of a scan: of a sample, of what flips, and why there may be none."""

import dataclasses

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import rankdata

from moegeom.measure.passes import measure_router
from moegeom.metrics import METRICS
from tests.unit.scan import made

#: What stands in the columns below.
METRICS_OF_JUMPS = [
    METRICS[name] for name in ("tokens", "boundaries", "jump", "flips", "flip_jump")
]
FLIPPING = ("bf16-logits",)
TOKENS = 900


def expert(number: int, y: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(number)
    return np.tanh(y @ random.standard_normal((y.shape[-1], 4)))


def mixed(inputs, chosen, weights) -> np.ndarray:
    out = np.zeros((len(inputs), 4))
    for slot in range(chosen.shape[1]):
        for number in np.unique(chosen[:, slot]):
            if number >= 0:
                row = np.flatnonzero(chosen[:, slot] == number)
                out[row] += weights[row, slot, None] * expert(int(number), inputs[row])
    return out


def by_definition(router, y):
    """Jump, output and distance of each token of a renormalised softmax rule, token by token."""
    weight, k = router.weight.astype(np.float64), router.rule.top_k
    heights, outputs, distances, pairs = [], [], [], []
    for x in y.astype(np.float64):
        z = weight @ x
        ranks = rankdata(-z, method="ordinal")
        inside, outside = np.flatnonzero(ranks <= k), np.flatnonzero(ranks > k)
        apart = np.linalg.norm(weight[inside, None] - weight[None, outside], axis=2)
        gap = z[inside, None] - z[None, outside]
        distance = np.divide(gap, apart, out=np.full(gap.shape, np.inf), where=apart > 0.0)
        i, j = np.unravel_index(distance.argmin(), distance.shape)
        out, into = inside[i], outside[j]
        way = distance[i, j] * (weight[out] - weight[into]) / apart[i, j]
        at = np.exp(weight @ (x - way))
        share = at[out] / at[inside].sum()
        heights.append(share * np.linalg.norm(expert(out, x - way) - expert(into, x - way)))
        g = np.exp(z[inside]) / np.exp(z[inside]).sum()
        whole = sum(share * expert(e, x) for e, share in zip(inside, g, strict=True))
        outputs.append(np.linalg.norm(whole))
        distances.append(distance[i, j])
        pairs.append((int(out), int(into)))
    return np.array(heights), np.array(outputs), np.array(distances), pairs


def run_of(source, router=None, **changes):
    """Its tables; a router without its duplicate rows, whose boundary has no place."""
    if router is None:
        weight = made.router().weight.copy()
        weight[7] += 1.0
        router = dataclasses.replace(made.router(), weight=weight)
    metrics = {"metrics": METRICS_OF_JUMPS, "experts": mixed}
    return router, measure_router(made.run(source, router, **(metrics | changes)))


@pytest.fixture(scope="module")
def scanned():
    router, measured = run_of(made.recording(TOKENS), arithmetics=FLIPPING)
    return made.tables(measured), by_definition(router, made.inputs(TOKENS))


def test_columns_are_those_of_the_definition_token_by_token(scanned):
    rows, (height, output, distance, _) = scanned
    row = made.row_of(rows["layers"])
    assert (row["num_jump_tokens"], row["jump_known_share"]) == (TOKENS, 1.0)
    noise = 0.4247 * 2.0**-8 * np.sqrt((made.inputs(TOKENS).astype(np.float64) ** 2).mean(axis=1))
    chance = ndtr(-distance / noise)
    for column, expected in {
        "jump_p50": np.median(height),
        "jump_p99": np.quantile(height, 0.99),
        "jump_over_output_p50": np.median(height / output),
        "expected_jump": (chance * height).mean(),
        "expected_jump_over_output": (chance * height / output).mean(),
    }.items():
        np.testing.assert_allclose(row[column], expected, rtol=1e-3, err_msg=column)


def test_a_pair_has_the_mean_jump_of_its_tokens_and_flips_cost_their_share_of_it(scanned):
    rows, (height, _, _, pairs) = scanned
    listed = made.rows_of(rows["pairs"])
    assert listed
    for one in listed[:10]:
        pair = one["expert_out"], one["expert_in"]
        own = [h for h, p in zip(height, pairs, strict=True) if p == pair]
        np.testing.assert_allclose(one["jump_mean"], np.mean(own), rtol=1e-3)
    rows, (height, _, _, _) = scanned
    row = made.row_of(rows["layers"], FLIPPING[0])
    share = row["flipped_share"]
    assert row["num_flip_jumps"] == round(share * TOKENS) > 0
    np.testing.assert_allclose(row["flip_cost"], share * row["flip_jump_mean"])
    over_output = share * row["flip_jump_over_output_mean"]
    np.testing.assert_allclose(row["flip_cost_over_output"], over_output)
    assert height.min() <= row["flip_jump_mean"] <= height.max()


def test_without_experts_inputs_or_straight_boundaries_jumps_are_unknown():
    _, without = run_of(made.recording(300), experts=None, arithmetics=FLIPPING)
    assert without.facts["reasons"]["jump"] == "no experts were read (--experts)"
    assert without.facts["reasons"]["flip_jump"] == "no experts were read (--experts)"
    assert not any(row.get("jump_p50") for row in without.rows["layers"])
    logits = (made.inputs(300) @ made.router().weight.T).astype(np.float32)
    _, of_logits = run_of(made.Recorded(logits, "logits"))
    assert "needs recorded router inputs" in of_logits.facts["reasons"]["jump"]
    _, measured = run_of(made.recording(300), made.router("sigmoid"))
    row = made.row_of(made.tables(measured)["layers"])
    assert row["num_jump_tokens"] == 300
    assert 0.1 < row["jump_known_share"] < 1.0
