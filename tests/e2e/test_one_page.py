"""A checkpoint of 48 layers: every first screen fits a page, begins with its verdict, and says
what it leaves out; --detail and Markdown leave out nothing.
"""

from functools import cache
from typing import Any

import pytest

import moegeom as mg
from benchmarks.synthetic import SyntheticModel, write_checkpoint
from moegeom.document.renderers.table import PAGE
from tests.by_day import by_day

SOUND = SyntheticModel(hidden=32, experts=64, top_k=8, layers=48)
DAMAGED = SyntheticModel(
    hidden=32,
    experts=64,
    top_k=8,
    layers=48,
    duplicate=(1, 2, 20),
    zero=tuple(range(5, 30)),
    long=tuple(range(30, 47)),
    long_factor=12.0,
)
OTHER = SyntheticModel(hidden=32, experts=64, top_k=8, layers=48, seed=3)

MADE = {
    "scan": lambda: mg.scan("model"),
    "scan damaged": lambda: mg.scan("damaged"),
    "check": lambda: mg.check("model"),
    "check damaged": lambda: mg.check("damaged"),
    "diff": lambda: mg.diff("model", "damaged"),
    "diff unrelated": lambda: mg.diff("model", "other"),
    "signoff": lambda: mg.signoff("model", "other"),
    "track": lambda: mg.track("step_*", out="followed"),
}


@cache
def made(name: str) -> Any:
    return MADE[name]()


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name, model in (("model", SOUND), ("damaged", DAMAGED), ("other", OTHER)):
        write_checkpoint(folder / name, model)
    for step, name in enumerate(("model", "damaged", "other")):
        (folder / f"step_{step}").symlink_to(folder / name, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


#: By day a screen of each kind: measured, judged and damaged, two sides.
SCREENS = by_day(MADE, ["scan damaged", "check damaged", "signoff"])


@pytest.mark.parametrize("name", SCREENS)
def test_a_first_screen_fits_a_page_and_begins_with_its_verdict(name):
    for width in (80, 140):
        screen = made(name).text(width).splitlines()
        rows = sum(max(1, -(-len(line) // width)) for line in screen)
        assert rows <= PAGE
        assert screen[0].startswith("VERDICT  ")


@pytest.mark.parametrize("name", SCREENS)
def test_what_is_cut_is_said_with_the_option_that_shows_it(name):
    short, whole = made(name).text(80), made(name).text(80, detail=True)
    is_cut = len(whole.splitlines()) > len(short.splitlines())
    assert ("--detail" in short) >= is_cut
    assert "--detail" not in whole + made(name).markdown()
