"""Oracle: the worked numbers of the theory notes, each computed there by other means.

``tests/data/theory_fixtures.json`` holds them all. Every fixture is either run below or listed by
name under ``NOT_DELIVERED``.
"""

import hashlib
import json
import math
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from numpy.testing import assert_allclose

from benchmarks.gated_attention import SIGMOID, Mixture, published_truth, regression
from benchmarks.slopes_of_descents_are_those_of_their_starts import loss_1, loss_2, split
from benchmarks.trained import osr
from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry import capacity, gram, selection, space
from moegeom.geometry import load as loads
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.boundary.linear import boundary_distance, row_distances
from moegeom.geometry.jump import exchanged, jump
from moegeom.geometry.load import overlap_share
from moegeom.geometry.noise import boundary_sigmas, noisy_distances
from moegeom.geometry.number_formats import rounded_to
from moegeom.geometry.paths import exit_probability, face_quantile
from moegeom.geometry.rounding import flip_probability, rounding_sigmas
from moegeom.geometry.whatif import activation, smooth_gate, smoothing_budget
from moegeom.kernels.cpu.curved_distance import curved_distance
from moegeom.trainable import SmoothTopKRouter
from tests.oracle import helpers

DATA = Path(__file__).resolve().parents[1] / "data"
FILE = DATA / "theory_fixtures.json"
SHA256 = "9dad89eb78702dbe0a649c1f3a25b96b7a15a87bbcdd70485e17278af808960b"
FIXTURES = {f["name"]: f for f in json.loads(FILE.read_text("utf-8"))["fixtures"]}


def row(values):
    """One token."""
    return np.array([values], dtype=np.float64)


def hard_gate(z, k):
    rule = Rule(k, "softmax", Weights("scores", renormalise=True))
    found = selection.route(row(z), rule)
    gates = np.zeros(len(z))
    gates[found.chosen[0]] = found.weights[0]
    return gates


def jump_of_two_experts(z_at_boundary, k, Ei, Ej, pair):
    experts = np.zeros((len(z_at_boundary), len(Ei)))
    experts[pair] = Ei, Ej
    chosen = np.array([[*range(k - 1), pair[0]]], dtype=np.int32)
    weight = helpers.tied_weight(row(z_at_boundary), chosen, np.array([pair]))
    own = [hard_gate([z_at_boundary[e] for e in es], k) for es in ((0, 1), (0, 2))]

    def mixed(inputs, named, weights):
        return np.einsum("tk,tkd->td", weights * (named >= 0), experts[named])

    sides = [(chosen, row(own[0])), (exchanged(chosen, np.array([pair])), row(own[1]))]
    found = jump(row([0.0]), *sides, mixed)
    assert_allclose(found, weight * np.linalg.norm(np.subtract(Ei, Ej)))
    return found[0]


def distance_to_boundary(W, b, x, k):
    logits = row(np.array(W) @ x + b)
    rows = row_distances(np.array(W, dtype=np.float64), np.array(b, dtype=np.float64))
    return boundary_distance(logits, selection.top_k(logits, k), rows).distance[0]


def distances_and_gap(W, b, x, k):
    weight, bias = np.array(W), np.array(b)

    def only(pair):
        """Experts of one pair alone: the distance to where they tie."""
        return distance_to_boundary(weight[pair], bias[pair], x, 1)

    logits = row(weight @ x + bias)
    distance = distance_to_boundary(W, b, x, k)
    return [distance, selection.margin(logits, k)[0], only([0, 1]), only([0, 2])]


def distance_before_norm(W, g, x, k):
    """Without biases, ties are hyperplanes through 0 of the rows times the gain (docs/theory.md E3)."""
    return distance_to_boundary(np.array(W) * g, np.zeros(len(W)), x, k)


def load_figures(load):
    counts = np.array(load)
    entropy = float(loads.load_entropy_nats(counts))
    extremes = [loads.load_cv(counts), loads.max_vio(counts), loads.gini(counts)]
    return [*extremes, entropy / np.log(len(load)), np.exp(entropy)]


def coverage_and_chao1(counts):
    return [loads.good_turing_coverage(np.array(counts)), loads.chao1(np.array(counts))]


def groups_of(scores, n_group, topk_group, k):
    groups = GroupMask(n_group, topk_group, "top2_sum", -np.inf)
    rule = Rule(k, "identity", Weights("scores"), groups=groups)
    result = selection.route(row(scores), rule)
    is_left = selection.kept_groups(selection.group_scores(row(scores), groups), topk_group)[0]
    chosen = np.sort(result.chosen[0])
    return np.concatenate([np.flatnonzero(is_left), chosen, result.margin, result.group_margin])


def ratio_of_eigenvalues(eigenvalues, N):
    values = np.array(eigenvalues)
    raw = space.Moments(values, values, float((values**2).sum())).participation_ratio
    return [raw, space.participation_ratio_corrected(raw, N)]


def smoothed_softmax(z, k, eps, a, b):
    logits = row(z)
    weights = Weights("softmax_of_selected_logits")
    return smooth_gate(logits, logits, logits, k, weights, eps, a, b)


def agreement_of_runs(A, B):
    first, second = np.array(A, dtype=np.int32), np.array(B, dtype=np.int32)
    shared = overlap_share(first, second)
    return [(shared / (2.0 - shared)).mean(), shared.mean()]


def mean_entropy(z):
    p = loads.normalised_scores(np.array(z), "softmax")
    return loads.entropy_nats(p).mean() / np.log(p.shape[1])


def flip_by_rounding(gap, dw_y, kappa):
    rows = np.array([dw_y, np.zeros(len(dw_y))])
    ones, logits = np.ones((1, len(dw_y))), row([gap, 0.0])
    sigmas = rounding_sigmas(ones, logits, selection.top_k(logits, 1), rows)
    return flip_probability(sigmas, np.full(1, kappa))


def near_ties(z, k, eps):
    """Order and extra experts of one token."""
    return [helpers.order_eps(row(z), k, eps)[0], helpers.extra_experts(row(z), k, eps)[0]]


def nearest_boundary_by_factor(W, b, x, k, sigma):
    weight, logits = np.array(W), row(np.array(W) @ x + b)
    distances = noisy_distances(weight, np.array(sigma), np.array(b, dtype=np.float64))
    return boundary_sigmas(logits, selection.top_k(logits, k), distances).min()


def sigmoid_pair(u, v, K, Delta):
    """A router of these two experts."""
    _, upper, _ = curved_distance(row([u, v]), np.int32([[0]]), pair_of_sigmoids(K, Delta))
    return upper[0]


def sigmoid_lipschitz(u, v, K, Delta):
    """Each expert a group by itself: the difference of group scores is the one of the pair."""
    rows = pair_of_sigmoids(K, Delta, GroupMask(2, 1, "max", -np.inf))
    scores = selection.selection_scores(row([u, v]), rows.rule, rows.bias)
    return selection.margin(scores, 1)[0] / rows.group_slopes[0, 1]


def pair_of_sigmoids(K, Delta, groups=None):
    rule = Rule(1, "sigmoid", Weights("scores"), True, groups=groups)
    return curved_rows(np.linalg.cholesky(np.array(K)), rule, None, np.array([Delta, 0.0]))


#: Inputs on which functions of mixtures are compared.
SQUARE = np.random.default_rng(0).uniform(-1.0, 1.0, (500, 2))


def published_at(position):
    """The regression function of the published parameters, as a fixture asks for it."""
    return lambda x, params: regression(published_truth(), row(x), position)


def shifted_truth(delta):
    return split(published_truth(), np.array([delta, 0.0]))


def worked_losses(M, note_M, a_true, omega_true, a_fit, omega_fit, phi):
    scores = np.array([[M, np.zeros_like(M)]])
    true = Mixture(np.array([omega_true]), scores, np.array(a_true)[None, :, None])
    experts = np.array(a_fit).transpose(1, 0, 2)[None]
    fitted = Mixture(np.array([omega_fit]), scores, experts)
    return [loss_2(fitted, true, SQUARE, "value"), loss_1(fitted, true, SQUARE, 1.0, "value")]


def annealed(epochs: list[float], k: int, extra: float) -> list[float]:
    router, budgets = SmoothTopKRouter(4, k, 2, budget=k + extra), []
    for epoch in epochs:
        router.anneal(epoch)
        budgets.append(router.budget)
    return budgets


#: Fixtures, as file names are written -> the function of their inputs that must give the expected numbers.
DELIVERED = {
    "anneal": annealed,
    "topk_lex_ties": lambda z, k: np.sort(selection.top_k(row(z), k)[0]),
    "gate_hard": hard_gate,
    "window_spread_1": lambda z, k, n: selection.margin(row(z), k)[0],
    "dist_gamma1_worked": distance_to_boundary,
    "dist_pair_not_topgap": distances_and_gap,
    "prenorm_dist": distance_before_norm,
    "good_turing": coverage_and_chao1,
    "load_metrics": load_figures,
    "group_gap": groups_of,
    "order_exact_*": lambda z, k: near_ties(z, k, 0.0)[0],
    "window_spread_[2-9]": lambda z, k, n: helpers.tie_spread(row(z), k, n),
    "order_eps_*": lambda z, k, eps: near_ties(z, k, eps)[0],
    "extras_*": lambda z, k, eps: near_ties(z, k, eps)[1],
    "active_tie_order": near_ties,
    "logit_dist_inf_2": lambda z, k, n: helpers.tie_spread(row(z), k, n) / 2.0,
    "p_hit": lambda r_min, t: exit_probability(row([r_min]), t).lower,
    "t_quantile": lambda r, p: face_quantile(np.array([r]), p),
    "exit_prob_union": lambda r, t: exit_probability(row(r), t).upper,
    "r_min_sigma": nearest_boundary_by_factor,
    "gram_score": lambda R: gram.gram_score(gram.cosines(np.array(R) @ np.array(R).T)),
    "gram_welch": lambda E, D: gram.best_gram_score(E, D, is_centred=False),
    "gram_random": lambda D: gram.random_gram_score(2, D, is_centred=False),
    "twonn": lambda r1, r2: space.two_nn(np.stack([r1, r2], axis=1)),
    "mle_id": lambda T: space.levina_bickel(np.array(T), 3),
    "participation_ratio": ratio_of_eigenvalues,
    "mean_energy_share": lambda Y: space.mean_energy_share(np.array(Y, dtype=np.float64)),
    "routing_consistency": agreement_of_runs,
    "routing_entropy": mean_entropy,
    "capacity": lambda cf, k, N, E: loads.expert_capacity(N, E, k, cf),
    "flip_prob": flip_by_rounding,
    "bf16_round": lambda x: rounded_to(np.array(x), "bfloat16"),
    "sigmoid_pair_*": sigmoid_pair,
    "sigmoid_lipschitz": sigmoid_lipschitz,
    "hypersimplex_f": lambda E, k: [capacity.face_count(k, E, n) for n in range(E)],
    "strata_count": lambda M, k, n: capacity.face_count(k, M, n),
    "zaslavsky": lambda pairs: [capacity.zaslavsky(m, d) for m, d in pairs],
    "log_zaslavsky": lambda **numbers: math.log(capacity.zaslavsky(numbers["m"], numbers["d"])),
    "cells_total_affine": lambda E, d: capacity.total_cells(E, d, is_central=False),
    "cells_total_hom": lambda E, d: capacity.total_cells(E, d, is_central=True),
    "cells_ub": lambda cases: [capacity.most_cells(*case, False) for case in cases],
    "granularity_log10": lambda E, k, G: capacity.split_sets_log10(E, k, split=G),
    "granularity_doc_log10": lambda E, k, G, d: capacity.published_split_log10(
        E, k, split=G, dims=d
    ),
    "G_max": lambda N, d: N // d,
    "tropical_e3": lambda z, k: row(z)[:, selection.top_k(row(z), k)[0]].sum(),
    "power_distance": lambda W, b, x: (np.array(x) ** 2).sum() - 2.0 * (np.array(W) @ x + b),
    "example_4_21": lambda E, n_in: [
        capacity.published_regions(E, 4, 5, n_in).dense,
        capacity.published_regions(E, 1, 20, n_in).top_1,
        capacity.published_regions(E, 4, 5, n_in).top_k,
    ],
    "regions_ub": lambda cases_E_k_N_d: [capacity.most_regions(*case) for case in cases_E_k_N_d],
    "smoothstep": lambda u: activation(np.array(u, dtype=np.float64)),
    "smooth_gate": smoothed_softmax,
    "jump": jump_of_two_experts,
    "eps_for_budget": lambda gaps, k, k_star: smoothing_budget(np.array(gaps), k_star - k).eps,
    "osr_cost": lambda S, E_expr: osr.repulsive_cost(
        torch.tensor(S, dtype=torch.float64),
        torch.tensor(E_expr, dtype=torch.float64),
        0.5,
        0.5,
        0.7,
    ).numpy(),
    "osr_sinkhorn*": lambda C: osr.sinkhorn(
        (-torch.tensor(C, dtype=torch.float64) / 0.05).clamp(-50.0, 50.0), 3
    ).numpy(),
    "hmoe_MHA": published_at("none"),
    "hmoe_I": published_at("value"),
    "hmoe_II": published_at("sdpa"),
    "voronoi_worked": worked_losses,
    "split_L2": lambda delta, params, K: loss_2(
        shifted_truth(delta), published_truth(), SQUARE, "value"
    ),
    "split_f_MHA": lambda delta, params: np.abs(
        regression(shifted_truth(delta), SQUARE) - regression(published_truth(), SQUARE)
    ).max(),
    "pde_residual": lambda s: s * SIGMOID.at(row(s))[1] - SIGMOID.at(row(s))[0],
}

#: Fixtures whose number is not what their text defines, with the reason. The quantity is tested by
#: other means.
WRONG = {
    "prenorm_cone": "it uses cos phi_0 = beta / (D |a|); E3 says beta / (sqrt(D) |a|), and so does "
    "minimisation (test_linear_boundaries_against_programs.py): 0.18947, not 0.32288"
}

#: Quantities that moegeom does not compute, by name of their fixtures.
NOT_DELIVERED = """
    alpha_orthonormal_* cap_* dist_gamma2_* flat_dist_orthonormal gru_macs kappa_orthonormal_n2 log10_cap_* log_coeff
    log_slab_fraction_tail newton_schulz_step occ_* sig_diff slab_fraction_* thm42_* thm44_* thm47_*
    tie_prob_ulp tube_fraction_*
""".split()


def flat(value) -> np.ndarray:
    """Nested lists of numbers as one vector."""
    if isinstance(value, (list, tuple)):
        return np.concatenate([flat(v) for v in value])
    return np.atleast_1d(np.asarray(value, dtype=np.float64))


def test_quantities_give_the_worked_numbers_of_the_file_that_was_checked():
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == SHA256
    wrong, used = [], set()
    for name in FIXTURES.keys() - WRONG.keys():
        if any(fnmatchcase(name, one) for one in NOT_DELIVERED):
            continue
        (pattern,) = (one for one in DELIVERED if fnmatchcase(name, one))
        used.add(pattern)
        fixture = FIXTURES[name]
        numbers = np.ravel(DELIVERED[pattern](**fixture["inputs"]))
        expected = flat(fixture["expected"])
        if not np.allclose(numbers, expected, fixture["rtol"], fixture["atol"]):
            wrong.append((name, numbers, expected))
    assert wrong == []
    assert used == DELIVERED.keys()
