"""What cannot be meant is refused by every study before anything is written."""

import functools
from pathlib import Path

import pytest

import moegeom as mg
from moegeom.core.errors import UsageError
from moegeom.research.perturb.record import PerturbRequest
from moegeom.research.perturb.study import perturb
from moegeom.studies.diff.study import DifferenceRequest, difference
from moegeom.studies.imbalance.study import ImbalanceRequest, imbalance
from moegeom.studies.signoff.study import SignOffRequest, sign_off
from tests.unit.studies.samples import BALANCED, sides

CKPT, REC = sides(BALANCED)
ON_TOKENS = {"checkpoint": CKPT, "tokens": REC}
SIZES = {"experts": 16, "top_k": 4, "width": 20, "hidden": 64}
PAIR = {"tokens": ("rec_a", "rec_b")}
NAN = float("nan")


def on_sample(study, request, options) -> None:
    study(request(str(CKPT), **{"tokens": str(REC)} | options))


def on_two(study, request, options) -> None:
    study(request(str(BALANCED / "step_1000"), str(CKPT), **options))


def in_python(function, defaults, options) -> None:
    function(**defaults | options)


CALLS = {
    "imbalance": functools.partial(on_sample, imbalance, ImbalanceRequest),
    "perturb": functools.partial(on_sample, perturb, PerturbRequest),
    "diff": functools.partial(on_two, difference, DifferenceRequest),
    "signoff": functools.partial(on_two, sign_off, SignOffRequest),
    "continuity": functools.partial(in_python, mg.continuity, ON_TOKENS | {"layers": 0}),
    "regions": functools.partial(in_python, mg.regions, ON_TOKENS | {"layers": 0, "segments": 4}),
    "outputs": functools.partial(in_python, mg.outputs, ON_TOKENS),
    "capacity": functools.partial(in_python, mg.capacity, {}),
}

REFUSED = {
    "imbalance": [
        ({"tokens": None}, "needs recorded tokens"),
        ({"out": Path("laws.csv")}, "ends in .parquet or .npz"),
    ],
    "perturb": [
        ({"tokens": None}, "needs recorded tokens"),
        ({"time": 0.0}, "--time 0.0: expected a positive number"),
        ({"at": (5, 99_999)}, "--at 99999: .* holds tokens 0 to 4,095"),
        ({"drift": True}, "takes a second recording"),
        ({"noise": "-1"}, "--noise -1"),
        ({"out": Path("paths.csv")}, "ends in .parquet"),
    ],
    "diff": [
        ({"tokens": ("x", "y", "z")}, "two sides"),
        ({"stale_inputs": True}, "no --tokens"),
        ({"layers": "x"}, "neither a layer"),
        ({"layers": "7"}, "no router"),
    ],
    "signoff": [
        ({"tokens": ("rec_a",)}, "given 1 times"),
        ({"tokens": ("x", "y", "z")}, "given 3 times"),
        ({"tokens": ("rec_a", "./rec_a")}, "named twice"),
        (PAIR | {"rerun": "rec_a"}, "named twice"),
        ({"rerun": "rec_a"}, "--rerun is about recordings"),
        ({"max_flipped": 0.1}, "--max-flipped is about recordings"),
        ({"stale_inputs": True}, "--stale-inputs is about recordings"),
        (PAIR | {"max_flipped": 1.0}, "a share from 0 to less than 1"),
        (PAIR | {"max_flipped": NAN}, "a share from 0 to less than 1"),
        ({"layers": "x"}, "neither a layer"),
        ({"layers": "7"}, "no layer with a router"),
    ],
    "continuity": [
        ({"tokens": None}, "recorded tokens"),
        ({"smooth": "half"}, "smooth half"),
        ({"smooth": "extra=-1"}, "positive"),
        ({"radius": 0.0}, "radius 0"),
        ({"radius": 5.0}, "meets another boundary"),
        ({"at": 4096}, "tokens 0 to 4,095"),
    ],
    "regions": [
        ({"tokens": None}, "recorded tokens"),
        ({"subspace": "pca:3"}, "in a plane"),
        ({"segments": 1}, "2 or more"),
        ({"out": Path("regions.csv")}, "ends in .parquet"),
    ],
    "outputs": [
        ({"tokens": None}, "experts are computed on recorded tokens"),
        ({"sample": 1}, "expected 2 or more"),
        ({"out": REC}, "exists"),
    ],
    "capacity": [
        ({"experts": 64}, "width, hidden, top_k: not given"),
        (SIZES | {"top_k": 17}, "top_k 17: expected 1 to 16"),
        (SIZES | {"splits": 3}, "splits 3: does not divide the width 20"),
        (SIZES | {"splits": 65}, "expected numbers from 1 to 64"),
        (SIZES | {"data_dims": 65}, "data_dims 65: inputs have 64 numbers"),
        (SIZES | {"data_dims": "two"}, "data_dims 'two': expected int"),
        (SIZES | {"experts": 5000}, "experts 5000: expected 1 to 4,096"),
        (SIZES | {"shared": -1}, "shared -1: expected 0"),
        (SIZES | {"tokens": "rec"}, "tokens goes with checkpoint"),
        (SIZES | {"layers": 0}, "layers goes with checkpoint"),
        ({"checkpoint": CKPT, "experts": 4}, "experts goes without checkpoint"),
        ({"checkpoint": CKPT, "shared": 4}, "shared goes without checkpoint"),
        ({"checkpoint": CKPT, "splits": 5}, "splits 5: does not divide"),
    ],
}


@pytest.mark.parametrize("study", CALLS)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, message in REFUSED[study]:
        with pytest.raises(UsageError, match=message) as refusal:
            CALLS[study](options)
        assert refusal.value.exit_code == 2
        assert list(tmp_path.iterdir()) == [], options
