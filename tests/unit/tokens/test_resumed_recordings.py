"""A recording with a journal survives whatever ends its writer, and goes on to the same bytes."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegeom.core.errors import MoeGeomError, OutputError, UsageError
from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.tokens.recording.journal import recorded_tokens
from moegeom.tokens.recording.reader import open_recording
from moegeom.tokens.recording.writer import RecordingWriter

ROUTERS = ("text/0", "text/1")
JOURNAL = {"texts": "5f3a", "settings": {"length": 128, "files": ["a.txt", "b.txt"]}}
SHARDS = 4
TOKENS = 6


class Stopped(Exception):
    """What ends a block."""


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*")}


def shard(number, stage="logits", has_chosen=True, outputs=()):
    """Arguments of ``append``; documents go on from one shard into the next."""
    random = np.random.default_rng(number)
    token = np.arange(TOKENS) + TOKENS * number
    columns = TokenColumns(
        document=token // 4,
        position=(token % 4).astype(np.int32),
        token_id=random.integers(0, 99, TOKENS).astype(np.int32),
        domain=np.full(TOKENS, number // 2, np.int16),
    )
    rows = lambda *row: {
        r: random.standard_normal((TOKENS, *row)).astype(np.float32) for r in ROUTERS
    }
    chosen = {r: random.integers(0, 9, (TOKENS, 2)).astype(np.uint8) for r in ROUTERS}
    values = rows(5)
    if stage == "top_logits":
        expert = random.integers(0, 9, (TOKENS, 5)).astype(np.int32)
        values = {r: TopLogits(v, expert) for r, v in values.items()}
    width = {"shared_output": (3,), "expert_output": (4, 3)}
    given_outputs = {kind: rows(*width[kind]) for kind in outputs}
    return (
        (columns, None if stage == "ids" else values, chosen if has_chosen else None),
        {"outputs": given_outputs or None},
    )


def writer_of(path, stage="logits", journal=JOURNAL, **options):
    options = {"fingerprint": "sha256:1", "engine": "test", "domains": ("d0",), **options}
    return RecordingWriter(path, stage, ROUTERS, journal=journal, **options)


def go_on(writer, stop=SHARDS, **what):
    """Append what follows, up to shard ``stop``; domains come as they are met."""
    for number in range(writer.num_shards, stop):
        assert writer.add_domain(f"d{number // 2}") == number // 2
        arguments, options = shard(number, **what)
        writer.append(*arguments, **options)


def cut_off(path, stop, **options):
    """The partial folder of a writer that an exception ended after ``stop`` shards."""
    with pytest.raises(Stopped), writer_of(path, **options) as writer:
        go_on(writer, stop)
        raise Stopped
    return path.with_name(f"{path.name}.partial")


@pytest.fixture
def uninterrupted(tmp_path):
    """The files of a writer that nothing ended; without a journal."""
    with writer_of(tmp_path / "uninterrupted", journal=None) as writer:
        go_on(writer)
    return files(tmp_path / "uninterrupted")


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
    begun = 0
    for stop in stops:
        with pytest.raises(Stopped), writer_of(tmp_path / "rec", stage, **options) as writer:
            assert (writer.num_shards, writer.num_tokens) == (begun, begun * TOKENS)
            go_on(writer, stop, stage=stage, **what)
            raise Stopped
        assert (tmp_path / "rec.partial").exists() == (stop > 0)
        begun = stop
    with writer_of(tmp_path / "rec", stage, **options) as writer:
        assert (writer.num_shards, writer.num_tokens) == (begun, begun * TOKENS)
        go_on(writer, stage=stage, **what)
    assert files(tmp_path / "rec") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rec", "whole"]


def test_the_facts_of_what_was_there_before_are_restored(tmp_path):
    """Against what the reader finds, not only against another writer of ours."""
    cut_off(tmp_path / "rec", 3)
    with writer_of(tmp_path / "rec") as writer:
        go_on(writer)
    found = open_recording(tmp_path / "rec")
    assert found.facts.num_documents == SHARDS * TOKENS // 4
    assert found.facts.domains == ("d0", "d1")
    columns = found.read_columns(0, SHARDS * TOKENS)
    np.testing.assert_array_equal(columns.document, np.arange(SHARDS * TOKENS) // 4)
    np.testing.assert_array_equal(columns.domain, np.repeat([0, 0, 1, 1], TOKENS))


def test_shapes_of_the_first_shard_bind_the_shards_after_an_interruption(tmp_path, refused):
    cut_off(tmp_path / "rec", 1)
    (columns, values, chosen), _ = shard(1)
    with writer_of(tmp_path / "rec") as writer:
        wide = {r: np.ones((TOKENS, 6), np.float32) for r in ROUTERS}
        assert "expected (6, 5)" in refused(lambda: writer.append(columns, wide, chosen))
        assert "as in every shard" in refused(lambda: writer.append(columns, values))
        go_on(writer)


def test_no_reader_opens_what_is_unfinished(tmp_path, refused_open):
    partial = cut_off(tmp_path / "rec", 2)
    for path in (tmp_path / "rec", partial):
        assert "never finished" in refused_open(path)
    assert "no complete recording" in refused_open(partial / "whole")


# -------------------------------------------------------------------------------------- the journal


def test_a_torn_last_line_counts_as_absent(tmp_path, uninterrupted):
    partial = cut_off(tmp_path / "rec", 3)
    text = (partial / "journal.jsonl").read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", text)]  # of the plan and three shards
    cuts = sorted({*range(0, len(text), 61), *(end + d for end in ends for d in (-1, 0, 1))})
    for length in cuts[:-1]:
        again = shutil.copytree(partial, tmp_path / f"{length}.partial")
        (again / "journal.jsonl").write_bytes(text[:length])
        with writer_of(tmp_path / str(length)) as writer:
            assert writer.num_shards == max(0, sum(end <= length for end in ends) - 1)
            go_on(writer)
        assert files(tmp_path / str(length)) == uninterrupted


@pytest.mark.parametrize("tail", [b'{"num_tok', b"\0" * 99, b'"text"\n', b'{"num_tokens": 6\n'])
def test_what_a_failing_disk_leaves_at_the_end_counts_as_absent(tmp_path, uninterrupted, tail):
    partial = cut_off(tmp_path / "rec", 3)
    with (partial / "journal.jsonl").open("ab") as file:
        file.write(tail)
    with writer_of(tmp_path / "rec") as writer:
        assert writer.num_shards == 3
        go_on(writer, 3)
        assert json.loads((partial / "journal.jsonl").read_bytes().splitlines()[3])
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


@pytest.mark.parametrize(
    ("line", "edit", "expected"),
    [
        (1, lambda text: text[:-9], "line 2 is damaged"),
        (2, lambda text: b"[]", "line 3 is damaged"),
        (1, lambda text: text.replace(b'"num_bytes"', b'"x"'), "line 2: 'num_bytes' is missing"),
        (1, lambda text: text.replace(b'"book"', b'"x"'), "line 2: 'book' is missing"),
        (1, lambda text: text.replace(b"[5]", b"[0]"), "text/0: 'logits' is [0]; expected numbers"),
        (2, lambda text: text.replace(b": 6", b": 7"), "6 tokens in row groups"),
        (3, lambda text: text.replace(b'["d1"]', b'["d7"]'), "domain 'd1' is not listed"),
        (3, lambda text: text.replace(b'["d1"]', b'["d0"]'), "expected distinct names"),
        (1, lambda text: b'{"a": ' + b"[" * 99999 + b"]" * 99999 + b"}", "line 2 is damaged"),
    ],
)
def test_a_damaged_journal_is_refused_with_its_line_and_kept(
    tmp_path, refused, line, edit, expected
):
    partial = cut_off(tmp_path / "rec", 4)
    lines = (partial / "journal.jsonl").read_bytes().splitlines()
    lines[line] = edit(lines[line])
    (partial / "journal.jsonl").write_bytes(b"\n".join([*lines, b""]))
    before = tree(partial)
    message = refused(writer_of(tmp_path / "rec").__enter__)
    assert expected in message
    assert "begin again with restart" in message
    assert tree(partial) == before


@pytest.mark.parametrize("name", ["tokens-00001.parquet", "logits-text.1-00001.safetensors"])
@pytest.mark.parametrize("kept", [None, 0, -1])
def test_a_damaged_file_of_a_complete_shard_is_refused(tmp_path, refused, name, kept):
    file = cut_off(tmp_path / "rec", 3) / "whole" / name
    data = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(data[:kept])
    message = refused(writer_of(tmp_path / "rec").__enter__)
    assert (name if kept is None else "the files of shard 1 have") in message
    assert "begin again with restart" in message


@settings(max_examples=40)
@given(data=st.data())
def test_arbitrary_bytes_in_a_journal_end_in_a_value_or_in_one_of_our_errors(
    tmp_path_factory, data
):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    journal = cut_off(tmp_path / "rec", 2) / "journal.jsonl"
    text = bytearray(journal.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = start + data.draw(st.integers(0, 20))
        text[start:stop] = data.draw(st.one_of(st.binary(max_size=8), st.sampled_from(PIECES)))
    journal.write_bytes(text)
    assert recorded_tokens(tmp_path / "rec", JOURNAL) >= 0
    with (
        contextlib.suppress(MoeGeomError),
        contextlib.suppress(Stopped),
        writer_of(tmp_path / "rec"),
    ):
        raise Stopped


PIECES = [
    b"\n",
    b"null",
    b"1e999",
    b"-1",
    b"[",
    b"{}",
    b'"',
    b"true",
    b"9" * 5000,
    b"\\ud800",
    b"\n{}\n",
]


# ---------------------------------------------------------------------------------- another plan


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"stage": "router_input"}, 'stage was "logits" and is "router_input" now'),
        ({"dtype": "float16"}, 'dtype was null and is "float16" now'),
        ({"domains": ("d0", "x")}, 'domains[1] was absent and is "x" now'),
        ({"domains": ("x",)}, 'domains[0] was "d0" and is "x" now'),
        ({"fingerprint": "f"}, 'fingerprint was "sha256:1" and is "f" now'),
        ({"engine": "e"}, 'engine was "test" and is "e" now'),
        ({"journal": JOURNAL | {"texts": "6"}}, 'journal.texts was "5f3a" and is "6" now'),
        ({"journal": JOURNAL | {"new": None}}, "journal.new was absent and is null now"),
        ({"journal": {"texts": "5f3a"}}, 'journal.settings was {"length": 128, "files": ["a.txt"'),
        (
            {"journal": JOURNAL | {"settings": {"length": True, "files": []}}},
            "journal.settings.length was 128 and is true now",
        ),
        (
            {"journal": JOURNAL | {"settings": {"length": 128, "files": ["a.txt", "c.txt"]}}},
            'journal.settings.files[1] was "b.txt" and is "c.txt" now',
        ),
    ],
)
def test_another_plan_is_refused_with_the_first_key_and_both_values(tmp_path, change, expected):
    partial = cut_off(tmp_path / "rec", 2)
    (partial / "lock").unlink()  # a folder with a journal is one of ours, wherever it was copied to
    before = tree(partial)
    with pytest.raises(UsageError) as caught, writer_of(tmp_path / "rec", **change):
        pass
    assert f"rec.partial holds an unfinished recording of something else: {expected}" in str(
        caught.value
    )
    assert "Delete it, or begin again with restart" in caught.value.hint
    assert tree(partial) == before


def test_other_routers_are_refused(tmp_path):
    cut_off(tmp_path / "rec", 2)
    others = RecordingWriter(
        tmp_path / "rec", "logits", ("text/0", "text/2"), fingerprint="sha256:1", engine="test",
        domains=("d0",), journal=JOURNAL,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r'routers\[1\] was "text/1" and is "text/2"'), others:
        pass


def test_restart_discards_what_was_there(tmp_path, uninterrupted):
    partial = cut_off(tmp_path / "rec", 3, journal={"another": "plan"})
    (partial / "whole" / "tokens-00001.parquet").write_bytes(b"damaged")
    (partial / "lock").unlink()
    (partial / "copy").mkdir()
    (partial / "copy" / "file").write_bytes(b"")
    with writer_of(tmp_path / "rec", restart=True) as writer:
        assert (writer.num_shards, writer.num_tokens) == (0, 0)
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted
    assert not partial.exists()


def test_a_restart_that_was_ended_while_it_discarded_is_never_gone_on_from(
    tmp_path, uninterrupted, monkeypatch
):
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
    with writer_of(tmp_path / "rec") as writer:
        assert writer.num_shards == 0
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


@pytest.mark.parametrize("journal", [{"a": object()}, {"a": float("nan")}, {"a": np.int64(1)}])
def test_a_journal_that_is_no_json_is_a_usage_error(tmp_path, journal):
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        writer_of(tmp_path / "rec", journal=journal)


def test_recorded_tokens_are_those_that_a_writer_of_this_journal_finds(tmp_path):
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0
    partial = cut_off(tmp_path / "rec", 3)
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 3 * TOKENS
    assert recorded_tokens(tmp_path / "rec", {**JOURNAL, "texts": "other"}) == 0
    (partial / "journal.jsonl").write_bytes(b"damaged\n{}\n")
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0


# ------------------------------------------------------------------------------- files and folders


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


def test_an_existing_recording_is_refused(tmp_path):
    with writer_of(tmp_path / "rec") as writer:
        go_on(writer)
    for restart in (False, True):
        with (
            pytest.raises(UsageError, match="exists already"),
            writer_of(tmp_path / "rec", restart=restart),
        ):
            pass
    assert open_recording(tmp_path / "rec").facts.num_tokens == SHARDS * TOKENS


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("stop", [0, 1])
def test_the_folder_of_a_writer_without_journal_is_never_taken_over(tmp_path, restart, stop):
    with writer_of(tmp_path / "rec", journal=None) as writer:
        go_on(writer, stop)
        with (
            pytest.raises(UsageError, match="being written or was cut off"),
            writer_of(tmp_path / "rec", restart=restart),
        ):
            pass
        go_on(writer)
    assert open_recording(tmp_path / "rec").facts.num_tokens == SHARDS * TOKENS
    assert [path.name for path in tmp_path.iterdir()] == ["rec"]


def test_a_writer_without_journal_leaves_the_folder_of_one_with_a_journal_alone(tmp_path):
    partial = cut_off(tmp_path / "rec", 2)
    before = tree(partial)
    with (
        pytest.raises(UsageError, match="being written or was cut off"),
        writer_of(tmp_path / "rec", journal=None),
    ):
        pass
    assert tree(partial) == before


def test_what_an_end_between_the_rename_and_its_tidying_left_is_begun_again(
    tmp_path, uninterrupted
):
    partial = cut_off(tmp_path / "rec", 4)
    shutil.rmtree(partial / "whole")  # it was moved to its name, and removed there by its owner
    assert recorded_tokens(tmp_path / "rec", JOURNAL) == 0
    with (
        pytest.raises(UsageError, match="of something else: journal.texts"),
        writer_of(tmp_path / "rec", journal={}),
    ):
        pass
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
    with writer_of(tmp_path / "rec") as writer:
        assert writer.num_shards == 3
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


def test_a_writer_is_entered_once_and_takes_nothing_outside_its_block(tmp_path, refused):
    writer = writer_of(tmp_path / "rec")
    assert "outside" in refused(lambda: writer.append(*shard(0)[0]))
    with pytest.raises(Stopped), writer:
        go_on(writer, 1)
        raise Stopped
    assert "outside" in refused(lambda: writer.append(*shard(1)[0]))
    assert "entered once" in refused(writer.__enter__)


def test_a_domain_has_one_number_and_there_are_not_too_many(tmp_path, refused):
    with writer_of(tmp_path / "rec", journal=None) as writer:
        assert [writer.add_domain(name) for name in ("x", "d0", "y", "x")] == [1, 0, 2, 1]
        go_on(writer, 1)
    assert open_recording(tmp_path / "rec").facts.domains == ("d0", "x", "y")
    full = tuple(map(str, range(32767)))
    with pytest.raises(Stopped), writer_of(tmp_path / "full", domains=full) as writer:
        assert "at most 32767" in refused(lambda: writer.add_domain("one more"))
        assert writer.add_domain("32766") == 32766
        raise Stopped


# -------------------------------------------------------------------------------- other processes


@pytest.mark.parametrize("restart", [False, True])
def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path, uninterrupted, restart):
    with writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        with (
            pytest.raises(UsageError, match="is being written by another process"),
            writer_of(tmp_path / "rec", restart=restart),
        ):
            pass
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


def test_where_files_cannot_be_locked_a_file_says_who_writes(tmp_path, uninterrupted, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(Stopped), writer_of(tmp_path / "rec") as writer:
        go_on(writer, 2)
        busy = pytest.raises(UsageError, match="is being written by another process")
        with busy, writer_of(tmp_path / "rec"):
            pass
        assert str(os.getpid()) in (tmp_path / "rec.partial" / "owner").read_text()
        raise Stopped
    with writer_of(tmp_path / "rec") as writer:
        assert writer.num_shards == 2
        go_on(writer)
    assert files(tmp_path / "rec") == uninterrupted


@pytest.mark.parametrize("num_shards", [0, SHARDS])
def test_a_lock_that_its_owner_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch, num_shards):
    """A writer that ends, well or not, while another one has opened its lock but not locked it."""
    flock, ended = fcntl.flock, []

    def end_first(file, operation):
        if not ended:
            ended.append(True)
            first.__exit__(*((None,) * 3 if num_shards else (Stopped, Stopped(), None)))
        return flock(file, operation)

    first = writer_of(tmp_path / "rec")
    first.__enter__()
    go_on(first, num_shards)
    monkeypatch.setattr(fcntl, "flock", end_first)
    with (
        pytest.raises(UsageError, match="being written by another process"),
        writer_of(tmp_path / "rec"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["rec"] * (num_shards > 0)


def test_a_lock_that_was_made_anew_is_the_one_that_counts(tmp_path, uninterrupted, monkeypatch):
    """One writer leaves and another one comes while a third has opened the lock of the first."""
    flock, came = fcntl.flock, []

    def change_hands(file, operation):
        if not came:
            came.append(writer_of(tmp_path / "rec"))
            first.__exit__(Stopped, Stopped(), None)
            came[0].__enter__()
        return flock(file, operation)

    first = writer_of(tmp_path / "rec")
    first.__enter__()
    monkeypatch.setattr(fcntl, "flock", change_hands)
    with (
        pytest.raises(UsageError, match="being written by another process"),
        writer_of(tmp_path / "rec"),
    ):
        pass
    go_on(came[0])
    came[0].__exit__(None, None, None)
    assert files(tmp_path / "rec") == uninterrupted


#: Reads from each line a path, a number of shards and a number n; forks a writer of them that goes
#: on where it can and ends as by SIGKILL before the n-th thing that it does to the file system, if n
#: is not 0; prints the child's number and, once the child is gone, how it ended. The child marks
#: each shard in a file beside the path.
FORKER = """
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

def end_before(n):
    left = [n]
    def before_each_call(frame, event, called):
        if event == "c_call" and called.__name__ in TOUCHES:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
    sys.setprofile(before_each_call)

record(sys.argv[1], 1)  # from here on everything is imported
for line in sys.stdin:
    path, num_shards, n = line.strip().rsplit(" ", 2)
    child = os.fork()
    if not child:
        if int(n):
            end_before(int(n))
        record(path, int(num_shards))
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forker:
    """Writers in processes of their own."""

    TOKENS = 500

    def __init__(self, folder, num_shards) -> None:
        self.num_shards = num_shards
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKER, str(folder / "imports")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.run(folder / "first") == 0  # waits for the forker itself
        begun = time.monotonic()
        assert self.run(folder / "undisturbed") == 0
        self.seconds = time.monotonic() - begun
        self.expected = files(folder / "undisturbed")

    def begin(self, path, end_before=0) -> int:
        print(path, self.num_shards, end_before, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """0, or how it ended."""
        return int(self.process.stdout.readline())

    def run(self, path, end_before=0) -> int:
        self.begin(path, end_before)
        return self.end()

    def check_left(self, path) -> int:
        """Shards to go on from: all that ``append`` returned for, and at most one more."""
        done = path.with_name(f"{path.name}.done")
        num_done = done.stat().st_size if done.exists() else 0
        if path.exists():
            assert files(path) == self.expected
            return 0
        found, rest = divmod(recorded_tokens(path, {}), self.TOKENS)
        assert (num_done <= found <= num_done + 1, rest) == (True, 0)
        if done.exists():
            os.truncate(done, found)
        return found

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def forker(tmp_path, request):
    forker = Forker(tmp_path, request.param)
    yield forker
    forker.close()


@pytest.mark.parametrize("forker", [2], indirect=True)
def test_ended_before_any_touch_of_the_disk_it_goes_on_to_the_same_bytes(forker, tmp_path):
    ended = 9 << 8  # where the hook leaves
    for n in itertools.count(1):
        path = tmp_path / f"at{n}"
        ended = forker.run(path, end_before=n)
        forker.check_left(path)
        if ended == 0:
            break
        assert ended == 9 << 8
        if not path.exists():
            assert forker.run(path) == 0
            assert files(path) == forker.expected
    assert n > 40


def kill_again_and_again(forker, folder, num_kills: int) -> None:
    moments = random.Random(6)
    kills, runs, resumed = 0, 0, 0
    while kills < num_kills:
        path = folder / f"rec{runs}"
        runs += 1
        for _ in range(3):
            child = forker.begin(path)
            time.sleep(moments.uniform(0.0, 1.1 * forker.seconds))
            with contextlib.suppress(ProcessLookupError):  # it had ended and was waited for
                os.kill(child, signal.SIGKILL)
            forker.end()
            kills += 1
            resumed += forker.check_left(path)
            if path.exists():
                break
        if not path.exists():
            assert forker.run(path) == 0
        assert files(path) == forker.expected
    assert resumed > 0


@pytest.mark.parametrize("forker", [8], indirect=True)
def test_ten_kills_lose_at_most_the_shard_that_was_being_written(forker, tmp_path):
    kill_again_and_again(forker, tmp_path, 10)


@pytest.mark.nightly
@pytest.mark.parametrize("forker", [8], indirect=True)
def test_a_hundred_kills_lose_at_most_the_shard_that_was_being_written(forker, tmp_path):
    kill_again_and_again(forker, tmp_path, 100)


@pytest.mark.parametrize("forker", [2], indirect=True)
def test_a_writer_in_another_process_is_refused_until_the_first_is_gone(forker, tmp_path):
    values = {r: np.zeros((1, 40), np.float32) for r in ROUTERS}
    numbers = [np.zeros(1, dtype) for dtype in (np.int64, np.int32, np.int32, np.int16)]
    with (
        pytest.raises(Stopped),
        RecordingWriter(tmp_path / "rec", "logits", ROUTERS, journal={}) as writer,
    ):
        writer.add_domain("d0")
        writer.append(TokenColumns(*numbers), values)
        assert forker.run(tmp_path / "rec") != 0
        assert not (tmp_path / "rec.done").exists()
        raise Stopped
    assert forker.run(tmp_path / "rec") == 0
    assert open_recording(tmp_path / "rec").facts.num_tokens == 1 + forker.TOKENS
