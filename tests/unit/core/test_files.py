"""A file is whole or absent; an unfinished folder is this user's, or it is left alone."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from moegeom.core import files
from moegeom.core.errors import OutputError, UsageError
from moegeom.core.text import quoted

resource = pytest.importorskip("resource", reason="limits of POSIX")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_texts_bytes_and_writers_are_written_alone_with_the_rights_that_open_gives(tmp_path):
    (tmp_path / "opened").write_text("")
    for content, expected in (
        ("é\n", "é\n".encode()),
        (b"\0\xff", b"\0\xff"),
        (lambda file: file.write(b"own"), b"own"),
    ):
        files.write_whole(tmp_path / "x", content)
        assert (tmp_path / "x").read_bytes() == expected
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "opened").stat().st_mode
    files.write_whole(tmp_path / "own", "", mode=0o600)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600
    assert names(tmp_path) == ["opened", "own", "x"]


WRITER = """
import sys
from pathlib import Path
from moegeom.core.files import write_whole

for _ in range(40):
    write_whole(Path(sys.argv[1]), sys.argv[2] * int(sys.argv[3]))
"""


def test_of_two_processes_that_write_one_file_each_reader_sees_one_whole(tmp_path):
    file, wholes = tmp_path / "b.json", {"a" * 300_000, "b" * 500_000}
    file.write_text("a" * 300_000)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file), whole[0], str(len(whole))], env=environment
        )
        for whole in sorted(wholes)
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(file.read_text())
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen | {file.read_text()} == wholes
    assert names(tmp_path) == ["b.json"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    (tmp_path / "null").symlink_to(os.devnull)
    files.write_whole(tmp_path / "null", "gone")
    assert names(tmp_path) == ["link", "null", "real"]
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@pytest.mark.parametrize("when", ["write", "fsync", "replace"])
def test_a_failure_at_any_moment_leaves_what_was_there(tmp_path, monkeypatch, when):
    (tmp_path / "x").write_text("old")

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    content = "new"
    if when == "write":
        content = fail
    else:
        monkeypatch.setattr(os, when, fail)
    with pytest.raises(OutputError, match=r"x: cannot be written \(No space left") as caught:
        files.write_whole(tmp_path / "x", content)
    assert (caught.value.exit_code, caught.value.hint[:9]) == (2, "Make room")
    monkeypatch.undo()
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_file_that_does_not_fit_is_our_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            files.write_whole(tmp_path / "x", lambda file: np.savez(file, a=np.ones(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["file/x.txt", "absent/x.txt", "", "/proc/x.txt"])
def test_an_unwritable_output_is_refused_before_and_after(tmp_path, name):
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    for act in (files.refuse_unwritable, lambda path: files.write_whole(path, "")):
        with pytest.raises(OutputError) as caught:
            act(path)
        assert str(path) in caught.value.message
    with (
        pytest.raises(OutputError, match=f"{tmp_path.name}: cannot be written"),
        files.writing(tmp_path),
    ):
        (tmp_path / "absent" / "file").write_text("")


def test_refusing_leaves_no_trace(tmp_path):
    (tmp_path / "old").write_text("old")
    files.refuse_unwritable(tmp_path / "old")
    files.refuse_unwritable(tmp_path / "new")
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_only_regular_files_are_opened_and_links_only_when_asked(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(OSError):  # noqa: PT011 - each system has its own sentence
            files.open_regular(tmp_path / name)
    for name, follows in (("file", False), ("link", True)):
        with files.open_regular(tmp_path / name, follows) as file:
            assert file.read() == b"12345"
    assert files.read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes") as caught:
        files.read_regular(tmp_path / "file", 4)
    assert caught.value.errno == errno.EFBIG
    (tmp_path / "zeros").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        files.read_regular(tmp_path / "zeros", 5, follows=True)


def test_what_is_in_the_way_gives_way_to_a_file_that_follows_no_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "link", "dangling", "null"):
        files.write_whole(tmp_path / name, name, follows=False)
        assert files.read_regular(tmp_path / name, 100).decode() == name
    assert (tmp_path / "kept").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_what_a_file_gives_is_quoted_shortly_and_what_is_short_as_it_is():
    for value in ("x" * 10**6, ["y" * 9] * 10**5, {"a": {"b": ["c" * 999] * 99}}, 9**4000):
        assert len(quoted(value)) <= 200
        assert quoted(value, 40)[:2] == repr(value)[:2]
        assert len(quoted(value, 40)) <= 40
    for value in ("a", 3, None, [1, 2], {"a": 1}, (4, "x")):
        assert quoted(value) == repr(value)


def test_a_folder_is_moved_to_a_name_that_is_free(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "taken").symlink_to("nowhere")
    with pytest.raises(OutputError, match="taken: cannot be written"):
        files.move_folder(tmp_path / "made", tmp_path / "taken")
    files.move_folder(tmp_path / "made", tmp_path / "free")
    assert names(tmp_path) == ["free", "taken"]


@pytest.fixture
def work(tmp_path):
    folder = files.WorkFolder(tmp_path / "out.partial", "plan.json")
    yield folder
    folder.release()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such step")
@pytest.mark.parametrize("stop", [1, 2])
def test_while_a_folder_is_replaced_one_of_the_two_has_the_name(tmp_path, monkeypatch, stop):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename, calls = Path.rename, []

    def ended(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", ended)
    with contextlib.suppress(KeyboardInterrupt):
        files.move_folder(tmp_path / "new", tmp_path / "old", tmp_path / "replaced")
    assert calls
    assert (tmp_path / "old/new").exists()


def test_a_folder_is_made_for_its_owner_alone_and_goes_with_all_it_holds(tmp_path, work):
    work.take()
    assert stat.S_IMODE(work.path.stat().st_mode) == 0o700
    assert work.plan.read_bytes() == b""
    (work.path / "parts").mkdir()
    work.release(is_last=True)
    assert names(tmp_path) == []


def test_what_is_left_is_taken_over_and_never_by_two(tmp_path, work):
    work.take()
    files.write_whole(work.plan, "{}")
    other = files.WorkFolder(work.path, "plan.json")
    with pytest.raises(UsageError, match="being written by another process"):
        other.take()
    work.release()
    other.take()
    assert other.plan.read_text() == "{}"
    other.clear()
    assert other.plan.read_bytes() == b""
    other.release(is_last=True)
    assert names(tmp_path) == []


def link_to(target):
    return lambda path: path.symlink_to(target)


HOSTILE = {
    "the lock is a link": ("lock", link_to("../precious")),
    "the plan is a link": ("plan.json", link_to("../precious")),
    "a part is a link to a folder": ("parts", link_to("../treasure")),
    "a link deep inside": ("parts/text.0/layers.parquet", link_to("../../../precious")),
    "the lock is a pipe": ("lock", os.mkfifo),
    "the plan is a pipe": ("plan.json", os.mkfifo),
    "the plan is a folder": ("plan.json", os.mkdir),
    "a pipe inside": ("snapshots/x.npz", os.mkfifo),
}


@pytest.mark.parametrize(("place", "make"), HOSTILE.values(), ids=HOSTILE)
def test_what_only_somebody_else_can_have_made_is_refused_and_left_alone(
    tmp_path, work, place, make
):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "treasure").mkdir()
    (tmp_path / "treasure" / "file").write_text("treasure")
    work.path.mkdir()
    if place != "plan.json":
        work.plan.write_text("{}")
    (work.path / place).parent.mkdir(parents=True, exist_ok=True)
    make(work.path / place)
    before = sorted(str(path) for path in work.path.rglob("*"))
    with pytest.raises(UsageError, match="not gone on with") as caught:
        work.take()
    assert "delete it" in caught.value.hint
    assert sorted(str(path) for path in work.path.rglob("*")) == before
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "treasure" / "file").read_text() == "treasure"
    assert names(tmp_path) == ["out.partial", "precious", "treasure"]


@pytest.mark.parametrize("make", [link_to("nowhere"), link_to("."), os.mkfifo, Path.touch])
def test_a_name_that_is_no_folder_is_left_alone(tmp_path, work, make):
    make(work.path)
    with pytest.raises(UsageError, match="is no folder"):
        work.take()
    assert names(tmp_path) == ["out.partial"]


def test_a_folder_of_the_users_own_files_is_left_alone(work):
    work.path.mkdir()
    (work.path / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match=r"holds no plan\.json"):
        work.take()
    assert (work.path / "thesis.tex").read_text() == "years"


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
@pytest.mark.parametrize("place", [".", "plan.json", "parts"])
def test_what_belongs_to_another_user_is_refused(work, place):
    work.path.mkdir()
    work.plan.write_text("{}")
    (work.path / "parts").mkdir()
    os.chown(work.path / place, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        work.take()


def test_of_many_at_once_one_gets_the_folder(tmp_path):
    """Every one makes a folder and tries to give it the name: one name, one lock, no traces."""
    folders = [files.WorkFolder(tmp_path / "out.partial", "plan.json") for _ in range(8)]
    begin, got = threading.Barrier(len(folders)), []

    def take(folder):
        begin.wait()
        try:
            folder.take()
        except UsageError:
            return
        got.append(folder)

    threads = [threading.Thread(target=take, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = got
    assert names(tmp_path) == ["out.partial"]
    winner.release(is_last=True)
    assert names(tmp_path) == []
