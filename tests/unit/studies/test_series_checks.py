"""Checks of a series: damaged runs and their healthy twins, made number by number."""

import dataclasses

import numpy as np
import pytest

from moegeom.checks.check import SECTIONS, page_of
from moegeom.core.finding import Verdict
from moegeom.studies.track.findings import SERIES_CHECKS, judge_series
from moegeom.studies.track.steps import Concentration, History, RouterHistory
from tests.by_day import by_day

EXPERTS, WIDTH = 16, 24
DOMAINS = ("domain=code", "domain=web", "domain=maths")


@dataclasses.dataclass
class Run:
    """States of a run by step, router and expert, to be damaged in place."""

    rows: np.ndarray
    bias: np.ndarray
    loads: np.ndarray
    effective: dict[str, np.ndarray]
    error: float | np.ndarray = 0.1
    has_tokens: bool = True
    other_text: str = ""
    z_loss: np.ndarray | None = None
    experts: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def judged(self) -> Verdict:
        routers = [self._router(place) for place in range(self.rows.shape[1])]
        steps = 100.0 * np.arange(1, len(self.rows) + 1)
        return judge_series(History(steps, tuple(routers), self.has_tokens, self.other_text))

    def titles(self) -> dict[str, list[str]]:
        told: dict[str, list[str]] = {}
        for finding in self.judged().findings:
            told.setdefault(finding.code, []).append(finding.title)
        return told

    def title(self, code: str) -> str:
        """Of the first finding, all being of this code."""
        titles = self.titles()
        assert list(titles) == [code]
        return titles[code][0]

    def _router(self, place: int) -> RouterHistory:
        errors = np.broadcast_to(np.array(self.error), len(self.rows))
        found = {
            name: Concentration(values[:, place], errors, 16)
            for name, values in self.effective.items()
        }
        return RouterHistory(
            f"text/{place}",
            tuple(self.rows[:, place]),
            tuple(str(hash(one.tobytes())) for one in self.rows[:, place]),
            self.bias[:, place],
            tuple(str(hash(one.tobytes())) for one in self.bias[:, place]),
            self.loads[:, place] if self.has_tokens else None,
            found if self.has_tokens else {},
            self.z_loss,
            self.experts,
        )


def healthy(kind: str, seed: int, steps: int = 24, routers: int = 3) -> Run:
    """A run whose bias balances its loads, in one of several shapes."""
    generator = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape)

    rate = {
        "walk": np.ones(steps),
        "warm-down": np.linspace(1.0, 0.0, steps) ** 2,
        "stops": (np.arange(steps) < steps // 2).astype(float),
        "scatter": np.ones(steps),
        "settling": 0.6 ** np.arange(steps),
        "cycles": 0.6 + 0.4 * np.cos(np.arange(steps)),
    }[kind]
    start = noise(1, routers, EXPERTS, WIDTH)
    moves = noise(steps, routers, EXPERTS, WIDTH)
    moves[0] = 0.0
    if kind == "scatter":
        rows = start + 0.1 * noise(*moves.shape)
    else:
        rows = start + np.cumsum(0.1 * rate[:, None, None, None] * moves, axis=0)
    # loads that were uneven, and a bias that makes them even in steps that shrink
    wanted = noise(1, routers, EXPERTS)
    reached = 1.0 - 0.8 ** np.arange(steps)[:, None, None]
    jitter = 0.03 * rate[:, None, None] * noise(steps, routers, EXPERTS)
    bias = reached * wanted + jitter
    if kind == "stops":
        bias[steps // 2 :] = bias[steps // 2]
    loads = 1.0 - 0.4 * (wanted - bias) + 0.05 * noise(steps, routers, EXPERTS)
    effective = {"all": 14.0 + 0.1 * noise(steps, routers)}
    for share, name in zip((0.9, 0.8, 0.7), DOMAINS, strict=True):
        special = 14.0 - 14.0 * (1.0 - share) * reached[:, :, 0]
        effective[name] = special + 0.1 * noise(steps, routers)
    return Run(rows, bias, loads, effective)


SHAPES = ("walk", "warm-down", "stops", "scatter", "settling", "cycles")


#: Numbers of drawn runs.
SEEDS = by_day(range(20), range(2))


@pytest.mark.parametrize("kind", SHAPES)
def test_healthy_runs_raise_no_alarm(kind):
    """Long and short, wide and narrow."""
    runs = (healthy(kind, n, (5, 12, 24, 40)[n % 4], (2, 3, 8)[n % 3]) for n in SEEDS)
    assert [alarms for run in runs if (alarms := run.titles())] == []


def test_rows_or_a_bias_that_are_there_again_are_told_with_the_step_they_are_of():
    run = healthy("walk", 0)
    run.rows[10:, 1] += run.rows[4, 1] - run.rows[10, 1]
    run.rows[10, 1] = run.rows[4, 1]  # to the bit
    assert run.title("MGT101") == "step 1100 holds the rows of step 500 again, bit for bit."
    assert run.judged().exit_code == 1
    run = healthy("walk", 1)
    run.rows, run.bias, run.loads = (
        np.concatenate([one, one], axis=2) for one in (run.rows, run.bias, run.loads)
    )
    run.bias[12, 0] = run.bias[3, 0]
    assert run.titles()["MGT101"] == [
        "step 1300 holds the selection bias of step 400 again, bit for bit."
    ]
    # Late in training a handful of numbers steps to and fro: 8 of them are no evidence.
    run = healthy("walk", 2)
    run.rows[-3:] = run.rows[-3]
    run.rows[-2, :, :8, 0] += 0.001
    assert "MGT101" not in run.titles()
    run.rows[-2, :, :, :4] += 0.001
    assert "MGT101" in run.titles()


def test_a_bias_that_begins_again_at_zero_is_told_and_one_that_never_began_or_swings_is_not():
    run = healthy("walk", 3)
    assert (run.bias[0] != 0.0).any()
    run.bias[:3] = 0.0
    assert "MGT102" not in run.titles()
    run.bias[15] = 0.0
    titles = run.titles()
    assert len(titles["MGT102"]) == 1  # three routers, told as one
    assert "at step 1600 every selection bias is 0 again" in titles["MGT102"][0]
    assert run.judged().exit_code == 1
    run = healthy("walk", 24)
    run.bias[:, 0] = (np.arange(24) % 2)[:, None] * np.sign(run.bias[-1, 0])
    assert "MGT102" not in run.titles()


def test_a_run_that_goes_on_from_an_earlier_step_is_told_and_one_that_swings_is_not():
    run = healthy("walk", 4)
    run.rows[14:, 2] += run.rows[9, 2] - run.rows[13, 2]
    title = run.title("MGT103")
    assert title.startswith("step 1500 takes back ")
    assert title.endswith("of the way from step 1000 to step 1400.")
    assert run.judged().exit_code == 0  # a warning
    # one interval alone
    run = healthy("walk", 5)
    run.rows[14:, 0] += run.rows[12, 0] - run.rows[13, 0]
    assert list(run.titles()) == ["MGT103"]
    run = healthy("walk", 6)
    run.rows[::2] += 3.0 * run.rows[0]
    run.rows[::2] += 2.0 * np.random.default_rng(0).standard_normal(run.rows.shape[1:])
    assert "MGT103" not in run.titles()
    run = healthy("walk", 7)
    run.rows[11] *= 3.0
    assert "MGT103" not in run.titles()


@pytest.mark.parametrize("onset", [0, 10, 22])
def test_a_router_that_stands_still_is_told_with_its_step(onset):
    run = healthy("walk", 8)
    run.rows[onset:, 1] = run.rows[onset, 1]
    title = run.title("MGT104")
    assert f"from step {100 * (onset + 1)} on its rows stand still" in title
    assert "2 other routers move on" in title


def test_routers_that_all_stop_and_one_that_lags_a_little_are_no_finding():
    run = healthy("walk", 9)
    run.rows[12:] = run.rows[12]
    assert run.titles() == {}
    run = healthy("walk", 10)
    run.rows[:, 1] = run.rows[0, 1] + 0.1 * (run.rows[:, 1] - run.rows[0, 1])
    assert run.titles() == {}
    # but one that stopped before the run did
    run = healthy("walk", 11)
    run.rows[8:, 0] = run.rows[8, 0]
    run.rows[16:] = run.rows[16]
    assert list(run.titles()) == ["MGT104"]


def test_a_bias_that_stands_still_alone_is_told_and_all_of_them_together_are_not():
    run = healthy("walk", 12)
    run.bias[10:, 2] = run.bias[10, 2]
    assert run.title("MGT105").startswith("from step 1100 on its selection bias stands still")
    run.bias[10:] = run.bias[10]
    assert run.titles() == {}


def swings(steps: int, size: float, decay: float = 1.0) -> np.ndarray:
    pattern = np.random.default_rng(99).standard_normal(EXPERTS)
    return (size * (-decay) ** np.arange(steps))[:, None] * (pattern - pattern.mean())


@pytest.mark.parametrize("onset", [0, 6])
def test_biases_and_loads_that_swing_are_told(onset):
    run = healthy("walk", 13, steps=32)
    run.bias[onset:, 1] = run.bias[-1, 1] + swings(32 - onset, 0.5)
    run.loads[onset:, 1] = 1.0 + swings(32 - onset, 0.3)
    titles = run.titles()
    assert set(titles) == {"MGT201", "MGT202"}
    told = int(titles["MGT202"][0].split()[2])
    assert abs(told - 100 * (onset + 1)) <= 200


@pytest.mark.parametrize("code", ["MGT201", "MGT202"])
def test_swings_that_die_down_or_are_small_are_no_finding(code):
    run = healthy("walk", 14, steps=32)
    run.bias[:, 1] = run.bias[-1, 1] + swings(32, 2.0, 0.9)
    run.loads[:, 1] = 1.0 + swings(32, 1.0, 0.9)
    assert code not in run.titles()
    run.bias[:, 1] = run.bias[-1, 1] + swings(32, 0.005)
    run.loads[:, 1] = 1.0 + swings(32, 0.005)
    assert code not in run.titles()


def runaway(run: Run, onset: int) -> Run:
    """From a step on the bias of router 0 goes where the load is, and the load follows it."""
    for step in range(onset, len(run.bias)):
        error = run.loads[step - 1, 0] - 1.0
        run.bias[step, 0] = run.bias[step - 1, 0] + 0.5 * error
        run.loads[step, 0] = 1.0 + np.clip(1.4 * error, -1.0, 3.0)
    return run


def test_a_bias_that_runs_the_wrong_way_is_told_and_one_that_balances_is_not():
    run = runaway(healthy("settling", 15), 12)
    title = run.title("MGT203")  # nor do the others, which have settled, look still
    assert 1000 <= int(title.split()[2]) <= 1300
    detail = run.judged().findings[0].detail
    assert "Correlation of ranks +" in detail
    assert "by chance within" in detail
    assert healthy("settling", 15).titles() == {}
    pattern = np.random.default_rng(4).standard_normal(EXPERTS)
    for growth in (0.9, 1.1):
        run = healthy("walk", 23)
        run.loads[:, 0] = 1.0 + 0.1 * growth ** np.arange(24)[:, None] * pattern
        run.bias[:, 0] = 0.02 * np.arange(24)[:, None] * pattern
        assert ("MGT203" in run.titles()) == (growth > 1.0)
    # Loads on strange text differ from those that the bias balances, at every step alike.
    for seed in SEEDS:
        run = healthy("walk", seed)
        strange = np.random.default_rng(1000 + seed).standard_normal(run.loads.shape[1:])
        run.loads[:] = 1.0 + 0.3 * strange
        assert "MGT203" not in run.titles()


def test_a_domain_that_concentrates_alone_is_told_and_all_together_are_not():
    run = healthy("walk", 16)
    run.effective["domain=maths"][9:, 1] = 4.2
    assert run.title("MGT204") == "from step 1000 on the load of domain maths lies on few experts."
    # without any error, too
    run = healthy("walk", 17)
    run.effective["domain=code"][9:, 0] = 4.0
    run.error = 0.0
    assert run.titles() == {}  # no error anywhere: nothing is known of chance
    until = np.where(np.arange(24) < 9, 0.2, 0.0)
    assert list(dataclasses.replace(run, error=until).titles()) == ["MGT204"]
    run = healthy("walk", 18)
    for name in DOMAINS:
        run.effective[name][9:] *= 0.45
    assert run.titles() == {}
    run = healthy("walk", 18)
    run.effective["domain=code"][9:] *= 0.4
    run.effective["all"][9:] *= 0.7
    assert run.titles() == {}


def states(run: Run) -> dict[str, str]:
    return {outcome.code: outcome.state for outcome in run.judged().outcomes}


def test_what_was_not_looked_at_stands_in_the_verdict_with_its_reason():
    run = healthy("walk", 19, steps=5)
    assert any("MGT201, MGT202 (5 steps; needs 19)" in one for one in run.judged().unseen)
    run.has_tokens = False
    said = states(run)
    assert [code for code in said if said[code] == "needs tokens"] == [
        "MGT201",
        "MGT203",
        "MGT204",
        "MGT205",
    ]
    run = healthy("walk", 19)
    run.other_text = "other tokens"
    assert any("MGT201, MGT204, MGT205 (other tokens)" in one for one in run.judged().unseen)
    run = healthy("walk", 19)
    del run.effective["domain=code"], run.effective["domain=web"]
    assert any("do not name two domains" in one for one in run.judged().unseen)
    assert all("each step by itself" in " ".join(r.judged().unseen) for r in (run,))
    verdict = healthy("walk", 21, steps=1).judged()
    assert {outcome.state for outcome in verdict.outcomes} <= {"needs more"}
    assert verdict.exit_code == 4
    run = healthy("walk", 22)
    bare = {"bias": None, "bias_digests": ("",) * 24}
    routers = tuple(dataclasses.replace(run._router(place), **bare) for place in range(3))
    verdict = judge_series(History(100.0 * np.arange(1, 25), routers, True))
    assert not any("MGT202" in one for one in verdict.unseen)
    mixed = History(100.0 * np.arange(1, 25), (run._router(0), *routers[1:]), True)
    assert "passed" in {o.state for o in judge_series(mixed).outcomes if o.code == "MGT102"}
    assert verdict.exit_code == 0
    verdict = judge_series(History(100.0 * np.arange(1, 25), routers, has_tokens=False))
    assert not any("MGT203" in one for one in verdict.unseen)


@pytest.mark.parametrize("routers", by_day([1, 3, 40], [1, 3]))
def test_the_least_number_of_steps_is_enough_to_find_something(routers):
    """With as many steps as it takes, swings without an exception are told; one step less asks."""
    for steps in range(8, 40):
        run = healthy("walk", 20, steps=steps, routers=routers)
        run.bias[:, 0] = swings(steps, 0.5)
        if states(run)["MGT202"] != "needs more":
            assert "MGT202" in run.titles(), (routers, steps)
            break
    else:
        pytest.fail(f"{routers} routers: never judged")


def test_every_check_of_a_series_has_a_page_and_says_what_to_do():
    codes = set()
    for check in SERIES_CHECKS.all():
        page = page_of(check)
        assert page.statement.endswith(".")
        assert tuple(page.sections) == SECTIONS
        codes.add(check.code)
        assert check.inputs.startswith("series")
    assert len(codes) == len(SERIES_CHECKS.names())


def test_a_series_in_which_nothing_or_an_expert_never_changes_says_so():
    run = healthy("walk", 0)
    run.rows[:], run.bias[:] = run.rows[0], run.bias[0]
    assert run.title("MGT108").startswith(
        "all 3 routers that can be compared are bit for bit the same"
    )
    run = healthy("walk", 1)
    run.rows[:, 1, [2, 7]] = run.rows[0, 1, [2, 7]]
    assert run.title("MGT109") == "2 rows of 16 stood still at the last 3 steps: expert 2, 7."
    run.rows[-1, 1, [2, 7]] += 0.1
    assert run.titles() == {}
    run = healthy("walk", 1)
    run.rows[5:9, 1] = run.rows[5, 1]
    assert run.title("MGT109") == "the router stood still from step 600 to 900."
    run.rows[7, 1] += 0.1
    assert "MGT109" not in run.titles()


def test_sampled_experts_that_stand_still_are_told_where_their_router_moves():
    run = healthy("walk", 1, steps=4)
    moving = tuple("0123")
    run.experts = {0: tuple("0000"), 5: moving, 15: tuple("7777")}
    assert run.titles()["MGT110"][0].endswith(
        "2 experts of 3 sampled did not change from step 100 to 400: 0, 15."
    )
    run.experts = {0: moving, 5: tuple("0011"), 15: moving}
    assert run.titles() == {}
    run.experts, run.rows[:] = {0: tuple("0000")}, run.rows[0]
    assert "MGT110" not in run.titles()


def test_logits_that_grow_beyond_bounds_are_told_and_those_that_grow_a_little_are_not():
    run = healthy("walk", 2)
    for last, is_told in ((2210.0, True), (90.0, False)):
        run.z_loss = np.linspace(10.8, last, 24)
        assert ("MGT205" in run.titles()) == is_told
    run.z_loss = np.linspace(10.8, 2210.0, 24)
    assert run.title("MGT205").endswith(": its z-loss went from 10.8 to 2,210.")
