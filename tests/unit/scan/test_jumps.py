"""Jumps in the tables of a scan: of a sample, of what flips, and why there may be none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import rankdata

from moegeom.measure.passes import measure_router

FLIPPING = ("bf16-logits",)


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


def apart(router):
    """The router without its duplicate rows, whose boundary has no place."""
    weight = router.weight.copy()
    weight[7] += 1.0
    return dataclasses.replace(router, weight=weight)


@pytest.fixture(scope="module")
def scanned(made):
    router, source = apart(made.router()), made.recording(900)
    run = made.run(source, router, experts=mixed, arithmetics=FLIPPING)
    rows = made.tables(measure_router(run))
    return rows, by_definition(router, made.inputs(900))


def row_of(rows, variant):
    return next(
        row for row in rows["layers"] if (row["variant"], row["population"]) == (variant, "all")
    )


def test_columns_are_those_of_the_definition_token_by_token(made, scanned):
    rows, (height, output, distance, _) = scanned
    row = row_of(rows, "as_stored")
    assert (row["num_jump_tokens"], row["jump_known_share"]) == (900, 1.0)
    np.testing.assert_allclose(row["jump_p50"], np.median(height), rtol=1e-3)
    np.testing.assert_allclose(row["jump_p99"], np.quantile(height, 0.99), rtol=1e-3)
    np.testing.assert_allclose(row["jump_over_output_p50"], np.median(height / output), rtol=1e-3)
    noise = 0.4247 * 2.0**-8 * np.sqrt((made.inputs(900).astype(np.float64) ** 2).mean(axis=1))
    chance = ndtr(-distance / noise)
    np.testing.assert_allclose(row["expected_jump"], (chance * height).mean(), rtol=1e-3)
    np.testing.assert_allclose(
        row["expected_jump_over_output"], (chance * height / output).mean(), rtol=1e-3
    )


def test_a_pair_has_the_mean_jump_of_its_tokens(scanned):
    rows, (height, _, _, pairs) = scanned
    listed = [r for r in rows["pairs"] if r["population"] == "all" and r["variant"] == "as_stored"]
    assert listed
    for one in listed[:10]:
        own = [
            h
            for h, p in zip(height, pairs, strict=True)
            if p == (one["expert_out"], one["expert_in"])
        ]
        np.testing.assert_allclose(one["jump_mean"], np.mean(own), rtol=1e-3)


def test_flips_cost_the_share_that_flips_times_their_jump(scanned):
    rows, (height, _, _, _) = scanned
    row = row_of(rows, FLIPPING[0])
    assert row["num_flip_jumps"] == round(row["flipped_share"] * 900) > 0
    np.testing.assert_allclose(row["flip_cost"], row["flipped_share"] * row["flip_jump_mean"])
    np.testing.assert_allclose(
        row["flip_cost_over_output"], row["flipped_share"] * row["flip_jump_over_output_mean"]
    )
    assert height.min() <= row["flip_jump_mean"] <= height.max()


def test_without_experts_no_jump_is_known_and_the_reason_is_said(made):
    found = measure_router(made.run(made.recording(300), made.router(), arithmetics=FLIPPING))
    assert found.facts["reasons"]["jump"] == "no experts were read (--experts)"
    assert found.facts["reasons"]["flip_jump"] == "no experts were read (--experts)"
    assert not any(row.get("jump_p50") for row in found.rows["layers"])


def test_of_logits_alone_no_jump_is_known(made):
    router = made.router()
    logits = (made.inputs(300) @ router.weight.T).astype(np.float32)
    source = made.source("logits", made.columns(300), logits)
    found = measure_router(made.run(source, router, experts=mixed))
    assert "needs recorded router inputs" in found.facts["reasons"]["jump"]


def test_groups_leave_boundary_points_unknown_and_they_are_counted(made):
    found = measure_router(made.run(made.recording(300), made.router("sigmoid"), experts=mixed))
    row = row_of(made.tables(found), "as_stored")
    assert row["num_jump_tokens"] == 300
    assert 0.1 < row["jump_known_share"] < 1.0
