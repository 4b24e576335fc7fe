"""Every disagreement is explained by its own cause, and no twin by any."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from moegeom.studies.explain.record import VERDICTS, CauseVerdict
from tests.by_day import IS_NIGHT, by_day
from tests.generator.scoring import NAMES
from tests.museum import disagreements as of
from tests.museum.incidents import DISAGREEMENTS
from tests.museum.test_incidents import label
from tests.museum.two_runs import Runs, all_pairs

PAIRS = all_pairs(DISAGREEMENTS)

_DAY = {
    "gain not folded": (of.SMOOTHED, of.SMOOTHED.pairs[0]),
    "router stale": (of.ANOTHER_REVISION, of.ANOTHER_REVISION.pairs[1]),
    "bias rounded": (of.BIAS_CAST, of.BIAS_CAST.pairs[1]),
    "bias stale": (of.BIAS_FROZEN, of.BIAS_FROZEN.pairs[0]),
    "bias in routing weights": (of.BIAS_LEAKS, of.BIAS_LEAKS.pairs[0]),
    "layers shifted": (of.LAYERS_SHIFTED, of.LAYERS_SHIFTED.pairs[0]),
    "padding counted": (of.PADDING, of.PADDING.pairs[0]),
    "beyond noise": (of.RACE, of.RACE.pairs[1]),
    "not the router": (of.NOT_THE_ROUTER, of.NOT_THE_ROUTER.pairs[0]),
    "arithmetic noise only": (of.LAYERS_SHIFTED, of.LAYERS_SHIFTED.twins[0]),
}


@functools.cache
def verdict(build: Runs) -> CauseVerdict:
    """What the command says, by day of half the tokens; pairs that are built alike are one run."""
    runs = build()
    if not IS_NIGHT and build is not of.RACE.pairs[1].build:  # which many tokens tell from noise
        runs = replace(runs, tokens=min(runs.tokens, 1024))
    with tempfile.TemporaryDirectory() as folder:
        return runs.explained(Path(folder) / "runs").verdict


@pytest.mark.parametrize(("disagreement", "pair"), by_day(PAIRS, _DAY), ids=label)
def test_the_verdict_is_the_cause(disagreement, pair):
    assert verdict(pair.build).cause == pair.cause, verdict(pair.build).detail
    assert pair.begins is None or verdict(pair.build).router == f"text/{pair.begins}"


def test_every_verdict_is_shown_and_every_disagreement_has_a_twin():
    assert {pair.cause for _, pair in PAIRS} | NAMES == set(VERDICTS)
    assert all(disagreement.pairs and disagreement.twins for disagreement in DISAGREEMENTS)
