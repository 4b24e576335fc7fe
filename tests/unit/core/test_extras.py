"""What an extra brings is refused by name where it is absent, before any work."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from moegeom.core.errors import UsageError
from moegeom.document.paper import ENDINGS
from moegeom.routing_cells.pictures.views import check_picture
from moegeom.routing_cells.request import CellsRequest
from moegeom.studies.track.export import SERIES_EXPORTS

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
NEEDY = [name for name in SERIES_EXPORTS.names() if SERIES_EXPORTS[name].package]


@pytest.fixture
def bare(monkeypatch):
    """An installation of the core alone."""
    find = importlib.util.find_spec
    absent = ("matplotlib", "tensorboard", "wandb")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )


def refused(error: UsageError) -> tuple[str, str]:
    """The package that is missed and the extra that is advised."""
    words = r"needs (\w+), which is not installed.*pip install [^\[]+\[(\w+)\]"
    match = re.search(words, str(error), re.DOTALL)
    assert match
    return match[1], match[2]


def test_an_export_without_its_package_is_refused_with_the_extra_that_brings_it(bare):
    assert NEEDY == ["tensorboard", "wandb"]
    for name in NEEDY:
        export = SERIES_EXPORTS[name]
        assert any(export.package in entry for entry in EXTRAS[export.extra])
        with pytest.raises(UsageError) as caught:
            export.refuse_absent()
        assert refused(caught.value) == (export.package, export.extra)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_picture_is_refused_without_its_package_alone(tmp_path, request, ending):
    check_picture(CellsRequest("", plot=tmp_path / f"a{ending}"))
    request.getfixturevalue("bare")
    with pytest.raises(UsageError) as caught:
        check_picture(CellsRequest("", plot=tmp_path / f"a{ending}"))
    package, extra = refused(caught.value)
    assert any(package in entry for entry in EXTRAS[extra])
