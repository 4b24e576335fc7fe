"""A recording with a journal survives whatever ends its writer, and goes on to the same bytes."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from moegeom.core.errors import OutputError, UsageError
from moegeom.tokens.recording.journal import recorded_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.sources.recorded import open_recording
from tests.unit.results.test_runs import Forker
from tests.unit.tokens.conftest import ROUTERS, Content, refusal, refusal_to_open

JOURNAL = {"texts": "5f3a", "settings": {"length": 128, "files": ["a.txt", "b.txt"]}}
SHARDS = 4
TOKENS = 6
CONTENT = Content(SHARDS * TOKENS, width=5)


class Stopped(Exception):
    """What ends a block."""


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*")}


def shard(number, stage="logits", has_chosen=True, outputs=()):
    first = TOKENS * number
    part = CONTENT.part(first, first + TOKENS, stage, has_chosen, kinds=outputs)
    document = np.arange(first, first + TOKENS) // 4
    domain = np.full(TOKENS, number // 2, np.int16)
    return part | {"columns": replace(part["columns"], document=document, domain=domain)}


def writer_of(path, stage="logits", routers=ROUTERS, journal=JOURNAL, **options):
    options = {"fingerprint": "sha256:1", "engine": "test", "domains": ("d0",), **options}
    return RecordingWriter(path, stage, routers, journal=journal, **options)


def go_on(writer, stop=SHARDS, **what):
    for number in range(writer.num_shards, stop):
        assert writer.add_domain(f"d{number // 2}") == number // 2
        writer.append(**shard(number, **what))


def cut_off(path, stop, **options):
    """The partial folder of a writer that an exception ended after ``stop`` shards."""
    with pytest.raises(Stopped), writer_of(path, **options) as writer:
        go_on(writer, stop)
        raise Stopped
    return path.with_name(f"{path.name}.partial")


def finished(path, begun, **options):
    """The files of a recording that goes on from ``begun`` shards to its end."""
    with writer_of(path, **options) as writer:
        assert (writer.num_shards, writer.num_tokens) == (begun, begun * TOKENS)
        go_on(writer)
    return files(path)


def refuse(path, words, **options) -> UsageError:
    """How a writer is refused before it begins."""
    with pytest.raises(UsageError, match=words) as caught, writer_of(path, **options):
        pass
    return caught.value


BUSY = "is being written by another process"


@pytest.fixture
def uninterrupted(tmp_path):
    """The files of a writer that nothing ended; without a journal."""
    return finished(tmp_path / "uninterrupted", 0, journal=None)


@pytest.mark.parametrize(
    ("stage", "what", "options"),
    [
        ("logits", {}, {}),
        ("router_input", {"has_chosen": False}, {"dtype": "bfloat16"}),
        ("top_logits", {}, {"dtype": "float16"}),
        ("ids", {}, {}),
        ("ids", {"outputs": ("shared_output", "expert_output")}, {}),
    ],
)
@pytest.mark.parametrize("stops", [(0,), (1,), (SHARDS,), (1, 1, 3)])
def test_a_recording_that_goes_on_is_the_uninterrupted_one(tmp_path, stage, what, options, stops):
    with writer_of(tmp_path / "whole", stage, journal=None, **options) as writer:
        go_on(writer, stage=stage, **what)
    for begun, stop in itertools.pairwise((0, *stops, None)):
        end = contextlib.nullcontext() if stop is None else pytest.raises(Stopped)
        with end, writer_of(tmp_path / "rec", stage, **options) as writer:
            assert (writer.num_shards, writer.num_tokens) == (begun, begun * TOKENS)
            go_on(writer, SHARDS if stop is None else stop, stage=stage, **what)
            if stop is not None:
                raise Stopped
        assert (tmp_path / "rec.partial").exists() == bool(stop)
    assert files(tmp_path / "rec") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rec", "whole"]


def test_what_is_unfinished_opens_for_no_reader_and_binds_the_shards_that_follow(tmp_path):
    partial = cut_off(tmp_path / "rec", 2)
    for path in (tmp_path / "rec", partial):
        assert "never finished" in refusal_to_open(path)
    assert "no complete recording" in refusal_to_open(partial / "whole")
    cut_off(tmp_path / "rec", 1)
    part = shard(1)
    with writer_of(tmp_path / "rec") as writer:
        wide = {r: np.ones((TOKENS, 6), np.float32) for r in ROUTERS}
        assert "expected (6, 5)" in refusal(lambda: writer.append(**part | {"values": wide}))
        assert "as in every shard" in refusal(lambda: writer.append(**part | {"chosen": None}))
        go_on(writer)


def test_a_torn_last_line_counts_as_absent(tmp_path, uninterrupted):
    partial = cut_off(tmp_path / "rec", 3)
    text = (partial / "journal.jsonl").read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", text)]  # of the plan and three shards
    cuts = sorted({*range(0, len(text), 61), *(end + d for end in ends for d in (-1, 0, 1))})
    for length in cuts[:-1]:
        again = shutil.copytree(partial, tmp_path / f"{length}.partial")
        (again / "journal.jsonl").write_bytes(text[:length])
        begun = max(0, sum(end <= length for end in ends) - 1)
        assert finished(tmp_path / str(length), begun) == uninterrupted
    # and so does what a failing disk leaves at the end
    for number, tail in enumerate((b'{"num_tok', b"\0" * 99, b'"text"\n', b'{"num_tokens": 6\n')):
        again = shutil.copytree(partial, tmp_path / f"disk{number}.partial")
        (again / "journal.jsonl").write_bytes(text + tail)
        assert finished(tmp_path / f"disk{number}", 3) == uninterrupted


@pytest.mark.parametrize(
    ("line", "edit", "expected"),
    [
        (1, lambda text: text[:-9], "line 2 is damaged"),
        (2, lambda text: b"[]", "line 3 is damaged"),
        (1, lambda text: text.replace(b'"num_bytes"', b'"x"'), "key 'num_bytes' is missing"),
        (1, lambda text: text.replace(b'"book"', b'"x"'), "line 2: key 'book' is missing"),
        (1, lambda text: text.replace(b"[5]", b"[0]"), "text/0.logits[0] is 0, expected"),
        (1, lambda text: text.replace(b"[5]", b"[5, 5]"), "text/0 is (5, 5); expected numbers for"),
        (1, lambda text: text.replace(b'"text/1"]', b'"text/2"]'), "book is of other routers"),
        (2, lambda text: text.replace(b": 6", b": 7"), "6 tokens in row groups"),
        (3, lambda text: text.replace(b'["d1"]', b'["d7"]'), "domain 'd1' is not listed"),
        (3, lambda text: text.replace(b'["d1"]', b'["d0"]'), "expected distinct names"),
        (1, lambda text: b'{"a": ' + b"[" * 99999 + b"]" * 99999 + b"}", "line 2 is damaged"),
    ],
)
def test_a_damaged_journal_is_refused_with_its_line_and_kept(tmp_path, line, edit, expected):
    partial = cut_off(tmp_path / "rec", 4)
    lines = (partial / "journal.jsonl").read_bytes().splitlines()
    lines[line] = edit(lines[line])
    (partial / "journal.jsonl").write_bytes(b"\n".join([*lines, b""]))
    before = tree(partial)
    message = refusal(writer_of(tmp_path / "rec").__enter__)
    assert expected in message
    assert "begin again with restart" in message
    assert tree(partial) == before


def test_a_damaged_file_of_a_complete_shard_is_refused(tmp_path):
    whole = cut_off(tmp_path / "rec", 3) / "whole"
    for file in (whole / "tokens-00001.parquet", whole / "logits-text.1-00001.safetensors"):
        data = file.read_bytes()
        file.unlink()
        missing = refusal(writer_of(tmp_path / "rec").__enter__)
        assert file.name in missing
        for part in (b"", data[:-1]):
            file.write_bytes(part)
            short = refusal(writer_of(tmp_path / "rec").__enter__)
            assert "the files of shard 1 have" in short
            assert "begin again with restart" in short and "begin again with restart" in missing
        file.write_bytes(data)


def settings(**changes) -> dict:
    """The journal with others of its settings."""
    return {"journal": JOURNAL | {"settings": JOURNAL["settings"] | changes}}


#: Another plan, its first key that differs, and both values.
OTHERS = [
    ({"routers": ("text/0", "text/2")}, 'routers[1] was "text/1" and is "text/2"'),
    ({"stage": "router_input"}, 'stage was "logits" and is "router_input" now'),
    ({"dtype": "float16"}, 'dtype was null and is "float16" now'),
    ({"domains": ("d0", "x")}, 'domains[1] was absent and is "x" now'),
    ({"domains": ("x",)}, 'domains[0] was "d0" and is "x" now'),
    ({"fingerprint": "f"}, 'fingerprint was "sha256:1" and is "f" now'),
    ({"engine": "e"}, 'engine was "test" and is "e" now'),
    ({"journal": JOURNAL | {"texts": "6"}}, 'journal.texts was "5f3a" and is "6" now'),
    ({"journal": JOURNAL | {"new": None}}, "journal.new was absent and is null now"),
    ({"journal": {"texts": "5f3a"}}, 'journal.settings was {"length": 128, "files": ["a.txt"'),
    (settings(length=True, files=[]), "journal.settings.length was 128 and is true now"),
    (settings(files=["a.txt", "c.txt"]), 'settings.files[1] was "b.txt" and is "c.txt" now'),
]


def test_another_plan_is_refused_with_the_first_key_and_both_values(tmp_path):
    partial = cut_off(tmp_path / "rec", 2)
    (partial / "lock").unlink()  # a folder with a journal is one of ours, wherever it was copied to
    before = tree(partial)
    sentence = "rec.partial holds an unfinished recording of something else: "
    for change, expected in OTHERS:
        error = refuse(tmp_path / "rec", f"{sentence}.*{re.escape(expected)}", **change)
        assert "Delete it, or begin again with restart" in error.hint
        assert tree(partial) == before


def test_restart_discards_what_was_there(tmp_path, uninterrupted):
    partial = cut_off(tmp_path / "rec", 3, journal={"another": "plan"})
    (partial / "whole" / "tokens-00001.parquet").write_bytes(b"damaged")
    (partial / "lock").unlink()
    (partial / "copy").mkdir()
    (partial / "copy" / "file").write_bytes(b"")
    assert finished(tmp_path / "rec", 0, restart=True) == uninterrupted
    assert not partial.exists()


def test_a_restart_that_was_ended_is_begun_again(tmp_path, uninterrupted, monkeypatch):
    cut_off(tmp_path / "rec", 3)

    rmtree = shutil.rmtree

    def end(path, **options):
        if path.name != "whole":
            return rmtree(path, **options)
        (path / "tokens-00001.parquet").unlink()
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", end)
        with pytest.raises(Stopped), writer_of(tmp_path / "rec", restart=True):
            pass
    assert finished(tmp_path / "rec", 0) == uninterrupted


def test_recorded_tokens_are_those_that_a_writer_of_this_journal_finds(tmp_path):
    for value in (object(), float("nan"), np.int64(1)):
        with pytest.raises(UsageError, match="cannot be written as JSON"):
            writer_of(tmp_path / "rec", journal={"a": value})
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0
    partial = cut_off(tmp_path / "rec", 3)
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 3 * TOKENS
    assert recorded_tokens(tmp_path / "rec", {**JOURNAL, "texts": "other"}) == 0
    (partial / "journal.jsonl").write_bytes(b"damaged\n{}\n")
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0


def test_files_of_an_unfinished_shard_are_removed(tmp_path, uninterrupted):
    whole = cut_off(tmp_path / "rec", 2) / "whole"
    for name in ("tokens-00002.parquet", "logits-text.0-00009.safetensors", "recording.json"):
        (whole / name).write_bytes(b"half")
    (whole / "folder").mkdir()
    (whole / "folder" / "file").write_bytes(b"")
    with writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        assert len(files(whole)) == 2 * 5
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


def test_writers_with_and_without_journal_leave_each_others_folders_alone(tmp_path, uninterrupted):
    with writer_of(tmp_path / "rec", journal=None) as writer:
        for stop in (0, 1):
            go_on(writer, stop)
            for restart in (False, True):
                refuse(tmp_path / "rec", "being written or was cut off", restart=restart)
        shutil.copytree(tmp_path / "rec.partial", tmp_path / "killed.partial")
        go_on(writer)
    with writer_of(tmp_path / "killed", journal=None) as writer:
        go_on(writer)  # from the beginning, and nobody need delete what was there
    assert files(tmp_path / "killed") == files(tmp_path / "rec") == uninterrupted
    assert not (tmp_path / "rec.partial").exists()
    partial = cut_off(tmp_path / "other", 2)
    before = tree(partial)
    refuse(tmp_path / "other", "being written or was cut off", journal=None)
    assert tree(partial) == before


def test_what_is_left_between_rename_and_tidying_is_begun_again(tmp_path, uninterrupted):
    partial = cut_off(tmp_path / "rec", 4)
    shutil.rmtree(partial / "whole")  # it was moved to its name, and removed there by its owner
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0
    refuse(tmp_path / "rec", "of something else: journal.texts", journal={})
    with writer_of(tmp_path / "rec") as writer:
        assert writer.num_shards == 0
        assert (partial / "journal.jsonl").read_bytes().count(b"\n") == 1
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


def test_a_shard_that_cannot_be_written_may_be_appended_again(tmp_path, uninterrupted, monkeypatch):
    sync = os.fsync
    with pytest.raises(Stopped), writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        for calls in range(9):  # five files, the folder, the journal: two calls are not reached
            left = [calls]

            def fail(descriptor, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                sync(descriptor)

            monkeypatch.setattr(os, "fsync", fail)
            with contextlib.suppress(OutputError):
                go_on(writer, 3)
            monkeypatch.setattr(os, "fsync", sync)
        raise Stopped
    assert finished(tmp_path / "rec", 3) == uninterrupted


def test_a_writer_is_entered_once_and_takes_nothing_outside_its_block(tmp_path):
    writer = writer_of(tmp_path / "rec")
    assert "outside" in refusal(lambda: writer.append(**shard(0)))
    with pytest.raises(Stopped), writer:
        go_on(writer, 1)
        raise Stopped
    assert "outside" in refusal(lambda: writer.append(**shard(1)))
    assert "entered once" in refusal(writer.__enter__)


def test_a_domain_has_one_number_and_there_are_not_too_many(tmp_path):
    with writer_of(tmp_path / "rec", journal=None) as writer:
        assert [writer.add_domain(name) for name in ("x", "d0", "y", "x")] == [1, 0, 2, 1]
        go_on(writer, 1)
    assert open_recording(tmp_path / "rec").facts.domains == ("d0", "x", "y")
    full = tuple(map(str, range(32767)))
    with pytest.raises(Stopped), writer_of(tmp_path / "full", domains=full) as writer:
        assert "at most 32767" in refusal(lambda: writer.add_domain("one more"))
        assert writer.add_domain("32766") == 32766
        raise Stopped


def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path, uninterrupted):
    with writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        for restart in (False, True):
            refuse(tmp_path / "rec", BUSY, restart=restart)
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted
    for restart in (False, True):
        refuse(tmp_path / "rec", "exists already", restart=restart)
    assert files(tmp_path / "rec") == uninterrupted


def test_where_files_cannot_be_locked_a_file_says_who_writes(tmp_path, uninterrupted, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(Stopped), writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        refuse(tmp_path / "rec", BUSY)
        assert str(os.getpid()) in (tmp_path / "rec.partial" / "owner").read_text()
        raise Stopped
    assert finished(tmp_path / "rec", 2) == uninterrupted


def before_the_lock(monkeypatch, action):
    """Does something once, when a writer has opened its lock but not locked it."""
    flock, done = fcntl.flock, []

    def act(file, operation):
        if not done:
            done.append(True)
            action()
        return flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", act)


@pytest.mark.parametrize("num_shards", [0, SHARDS])
def test_a_lock_that_its_owner_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch, num_shards):
    """A writer that ends, well or not, while another one has opened its lock but not locked it."""
    first = writer_of(tmp_path / "rec")
    first.__enter__()
    go_on(first, num_shards)
    end = (None,) * 3 if num_shards else (Stopped, Stopped(), None)
    before_the_lock(monkeypatch, lambda: first.__exit__(*end))
    refuse(tmp_path / "rec", "being written by another process")
    assert [path.name for path in tmp_path.iterdir()] == ["rec"] * (num_shards > 0)


def test_a_lock_that_was_made_anew_is_the_one_that_counts(tmp_path, uninterrupted, monkeypatch):
    """One writer leaves and another one comes while a third has opened the lock of the first."""
    first, second = writer_of(tmp_path / "rec"), writer_of(tmp_path / "rec")
    first.__enter__()

    def change_hands():
        first.__exit__(Stopped, Stopped(), None)
        second.__enter__()

    before_the_lock(monkeypatch, change_hands)
    refuse(tmp_path / "rec", "being written by another process")
    go_on(second)
    second.__exit__(None, None, None)
    assert files(tmp_path / "rec") == uninterrupted


#: A recording of so many shards, which goes on where it can and ends as by SIGKILL before the n-th
#: thing that it does to the file system, if n is not 0. Each shard is marked in a file beside it.
RECORD = """
import os, sys
import numpy as np
import pyarrow.parquet, safetensors.numpy
from moegeom.core.tokens import TokenColumns
from moegeom.tokens.recording.writer import RecordingWriter

ROUTERS, TOKENS = ("text/0", "text/1"), 500
TOUCHES = "close fsync mkdir open rename rmdir serialize_file truncate unlink write".split()

def record(path, num_shards):
    with RecordingWriter(path, "logits", ROUTERS, journal={}) as writer:
        done = os.open(path + ".done", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in range(writer.num_shards, num_shards):
            random = np.random.default_rng(number)
            columns = TokenColumns(
                np.arange(TOKENS) // 9 + number * 50,
                np.arange(TOKENS, dtype=np.int32) % 9,
                np.full(TOKENS, number, np.int32),
                np.full(TOKENS, writer.add_domain(f"d{number // 2}"), np.int16),
            )
            values = {r: random.standard_normal((TOKENS, 40), dtype=np.float32) for r in ROUTERS}
            writer.append(columns, values)
            os.write(done, b".")

def work(path, num_shards, n):
    left = [int(n)]
    def before_each_call(frame, event, called):
        if event == "c_call" and called.__name__ in TOUCHES:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
    if left[0]:
        sys.setprofile(before_each_call)
    record(path, int(num_shards))

record(sys.argv[1], 1)  # from here on everything is imported
"""


class Recorder(Forker):
    """Writers in processes of their own."""

    TOKENS = 500

    def record(self, path, num_shards, end_before=0) -> int:
        return self.run(path, num_shards, end_before)

    def check_left(self, path, expected) -> int:
        """Shards to go on from: all that ``append`` returned for, and at most one more."""
        done = path.with_name(f"{path.name}.done")
        num_done = done.stat().st_size if done.exists() else 0
        if path.exists():
            assert files(path) == expected
            return 0
        left, rest = divmod(recorded_tokens(path, {}), self.TOKENS)
        assert (num_done <= left <= num_done + 1, rest) == (True, 0)
        if done.exists():
            os.truncate(done, left)
        return left


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    recorder = Recorder(RECORD, tmp_path_factory.mktemp("recorder") / "imports")
    yield recorder
    recorder.close()


def test_ended_before_any_touch_of_the_disk_it_goes_on_to_the_same_bytes(recorder, tmp_path):
    """As a kill ends it: nothing but these calls changes what is on the disk."""
    assert recorder.record(tmp_path / "whole", 2) == 0
    expected = files(tmp_path / "whole")
    for n in itertools.count(1):
        path = tmp_path / f"at{n}"
        ended = recorder.record(path, 2, end_before=n)
        recorder.check_left(path, expected)
        if ended == 0:
            break
        assert ended == 9 << 8  # where the hook leaves
        assert path.exists() or recorder.record(path, 2) == 0
        assert files(path) == expected
    assert n > 40
