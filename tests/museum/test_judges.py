"""Trained checkpoints that no limit was set on: their weights give no error, step after step."""

from __future__ import annotations

import itertools

import pytest

from tests.museum.healthy import SAMPLES, trained


def steps(name: str) -> list[str]:
    """Checkpoints of a training in the order of their steps."""
    found = sorted((SAMPLES / name).glob("step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    return [f"{name}/{path.name}" for path in found]


TRAININGS = [steps(name) for name in ("olmoe-balanced", "olmoe-collapsed", "deepseek-tiny")]
ALL = [name for names in TRAININGS for name in names]
FOLLOWING = [pair for names in TRAININGS for pair in itertools.pairwise(names)]


#: What the config leaves to engines: it was written by a class that does not read the keys.
SAID = {"deepseek-tiny": ("MGI113",)}


def said(name: str) -> tuple[str, ...]:
    return SAID.get(name.partition("/")[0], ())


@pytest.mark.parametrize("name", ALL)
def test_the_weights_of_a_trained_checkpoint_give_no_finding(museum, name):
    seen = museum.show(trained(name))
    assert (seen.codes, seen.exit_code) == (said(name), 0)


@pytest.mark.parametrize(("before", "after"), FOLLOWING)
def test_a_step_of_training_moves_rows_and_is_no_error(museum, before, after):
    seen = museum.show(trained(after), trained(before))
    assert seen.codes == ("MGG401", *said(after))
    assert seen.exit_code == 0
