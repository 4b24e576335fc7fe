"""Work is cut so that what is built once for a folder is built by one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schedule import FIRST, ROOT, piece_of, place_of


def test_a_folder_with_fixtures_is_one_piece_and_every_other_file_its_own():
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        above = [p for p in file.parents if p.is_relative_to(ROOT / "tests") and p.name != "tests"]
        with_fixtures = [folder for folder in above if (folder / "conftest.py").exists()]
        piece = piece_of(f"{name}::test_a[b::c/d]")
        if with_fixtures:
            assert piece == with_fixtures[0].relative_to(ROOT).as_posix()
        else:
            assert piece in {name, *FIRST[:2]}
            assert Path(name).is_relative_to(piece)


def test_folders_that_begin_are_there():
    assert [folder for folder in FIRST if not list((ROOT / folder).glob("test_*.py"))] == []


@pytest.mark.parametrize(
    ("one", "later"),
    [
        (("tests/parity", 1), ("tests/architecture", 99)),
        (("tests/e2e", 1), ("tests/unit/scan", 99)),
        (("tests/unit/scan", 1), ("tests/unit/api/test_a.py", 99)),
        (("tests/unit/api/test_b.py", 9), ("tests/unit/api/test_a.py", 8)),
    ],
)
def test_whole_folders_come_before_files_and_large_files_before_small_ones(one, later):
    assert place_of(*one) < place_of(*later)
