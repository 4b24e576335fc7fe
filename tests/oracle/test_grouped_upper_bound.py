"""Oracle: a dense search. The upper bound of grouped softmax routers is a flip, and a near one."""

from __future__ import annotations

import numpy as np

from moegeom.core.router import GroupMask, Rule, Weights
from moegeom.geometry.boundary.curved import curved_rows
from moegeom.geometry.selection import route
from moegeom.kernels.cpu.curved_distance import curved_distance

#: Random routers; most have one token near which the steepest descent finds nothing good.
ROUTERS = 60


def drawn(seed: int):
    random = np.random.default_rng(seed)
    experts, groups = int(random.choice([8, 12, 16, 24])), int(random.choice([2, 4]))
    hidden, kept = int(random.integers(2, 10)), int(random.integers(1, groups))
    kind, fill = str(random.choice(["max", "top2_sum"])), float(random.choice([-np.inf, 0.0]))
    k = int(random.integers(1, min(6, kept * experts // groups) + 1))
    weight = random.uniform(0.3, 1.5, (experts, 1)) * random.standard_normal((experts, hidden))
    bias = float(random.choice([0.01, 0.05])) * random.standard_normal(experts)
    rule = Rule(k, "softmax", Weights("scores"), True, groups=GroupMask(groups, kept, kind, fill))
    y = random.standard_normal((1, hidden)) * random.uniform(0.3, 3.0)
    return weight, bias, rule, y, random


class Search:
    """Steps after which a router chooses another set, by the rule alone."""

    def __init__(self, weight, bias, rule, y) -> None:
        self._weight, self._bias, self._rule, self._y = weight, bias, rule, y
        self._before = np.sort(route(y @ weight.T, rule, bias).chosen)

    def is_changed(self, steps):
        chosen = route((self._y + steps) @ self._weight.T, self._rule, self._bias).chosen
        return (np.sort(chosen, axis=1) != self._before).any(axis=1)

    def shortened(self, directions, length):
        """The shortest of steps of one length that change the set, after bisection."""
        low, high = np.zeros(len(directions)), np.full(len(directions), length)
        for _ in range(24):
            middle = (low + high) / 2.0
            changed = self.is_changed(middle[:, None] * directions)
            low, high = np.where(changed, low, middle), np.where(changed, middle, high)
        nearest = int(high.argmin())
        return float(high[nearest]), directions[nearest]

    def dense(self, random):
        """The nearest flip of many directions at growing lengths, improved by random turns."""
        hidden = self._weight.shape[1]
        rows = (self._weight[:, None] - self._weight[None]).reshape(-1, hidden)
        ways = np.concatenate([random.standard_normal((400, hidden)), rows, self._weight])
        size = np.linalg.norm(ways, axis=1)
        ways = ways[size > 1e-9] / size[size > 1e-9, None]
        for length in np.geomspace(1e-3, 1e3, 48):
            changed = self.is_changed(length * ways)
            if changed.any():
                break
        else:
            return np.inf
        best, way = self.shortened(ways[changed], length)
        for turn in 0.3 * 0.8 ** np.arange(24):
            near = way + turn * random.standard_normal((60, hidden)) / np.sqrt(hidden)
            near /= np.linalg.norm(near, axis=1, keepdims=True)
            changed = self.is_changed(best * (1.0 - 1e-4) * near)
            if changed.any():
                best, way = self.shortened(near[changed], best)
        return best


def test_the_upper_bound_is_as_near_as_a_dense_search_finds_a_flip():
    ratios = []
    for seed in range(ROUTERS):
        weight, bias, rule, y, random = drawn(seed)
        logits = y @ weight.T
        chosen = route(logits, rule, bias).chosen
        rows = curved_rows(weight, rule, None, bias)
        lower, upper, _ = curved_distance(logits, chosen, rows)
        best = Search(weight, bias, rule, y).dense(random)
        assert lower[0] <= best
        assert np.isfinite(upper[0]) == np.isfinite(best)
        if np.isfinite(best):
            ratios.append(upper[0] / best)
    # the search finds one within the bound each time, as the rule does change by then
    assert min(ratios) > 1.0 - 1e-9
    assert np.median(ratios) < 1.01
    assert np.quantile(ratios, 0.9) < 1.1
    assert max(ratios) < 2.0
