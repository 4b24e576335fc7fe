"""Work is cut so that what is built once for a folder is built by one worker."""

from pathlib import Path

from tests.schedule import FIRST, MODELS, ROOT, WHOLE, piece_of, place_of


def test_a_folder_with_fixtures_is_one_piece_and_every_other_file_its_own():
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        above = [p for p in file.parents if p.is_relative_to(ROOT / "tests") and p.name != "tests"]
        whole = [folder for folder in above if (folder / "conftest.py").exists()]
        piece = piece_of(f"{name}::test_a[b::c/d]")
        if name.startswith(MODELS):
            assert piece == "tests/families"
        elif whole:
            assert piece == whole[0].relative_to(ROOT).as_posix()
        else:
            assert piece in {name, *WHOLE}
            assert Path(name).is_relative_to(piece)


def test_folders_that_begin_are_there():
    folders = (*FIRST, *MODELS)
    assert [folder for folder in folders if not list((ROOT / folder).glob("test_*.py"))] == []


def test_whole_folders_come_before_files_and_large_files_before_small_ones():
    for one, later in (
        (("tests/parity", 1), ("tests/architecture", 99)),
        (("tests/e2e", 1), ("tests/unit/scan", 99)),
        (("tests/unit/scan", 1), ("tests/unit/api/test_a.py", 99)),
        (("tests/unit/api/test_b.py", 9), ("tests/unit/api/test_a.py", 8)),
    ):
        assert place_of(*one) < place_of(*later)
