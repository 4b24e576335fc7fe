"""``moegeom capture`` as it is typed, and killed."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import CheckpointError, RecordingError, UsageError
from moegeom.document.model import Document, View
from moegeom.document.render import render
from moegeom.recorder import recorder
from moegeom.recorder import run as runs
from moegeom.recorder.document import captured_document, plan_document
from moegeom.recorder.request import CaptureRequest, TextFile
from moegeom.tokens.open import open_tokens
from moegeom_cli.app import exit_code
from tests.unit.capture.conftest import Sample
from tests.unit.capture.test_recorder import assert_same_tokens, captured


@pytest.fixture
def text(balanced: Sample, tmp_path: Path) -> Path:
    lines = [
        json.dumps({"token_ids": ids[0].tolist(), "domain": domain})
        for _, domain, ids in balanced.documents()
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def request_of(sample: Sample, source: Path, out: Path, **options: object) -> CaptureRequest:
    usual = CaptureRequest(
        sample.path, (str(source),), out, dtype="float32", eager=True, tokenizer="bytes"
    )
    return dataclasses.replace(usual, **options)  # type: ignore[arg-type] - any of its fields


def run(request: CaptureRequest) -> Path:
    return runs.capture(request, runs.plan_capture(request)).out


def test_the_command_makes_the_recording_of_the_sample(balanced, text, tmp_path):
    """Bit for bit as made in a program."""
    recording = open_tokens(run(request_of(balanced, text, tmp_path / "rec", keep="hidden")))
    assert_same_tokens(recording, open_tokens(captured("olmoe-balanced")[0]))


@pytest.mark.parametrize("keep", ["hidden", "logits", "top-logits:6", "ids", None])
def test_a_plan_says_the_size_and_what_other_commands_need(balanced, text, tmp_path, keep):
    request = request_of(balanced, text, tmp_path / "rec", keep=keep, num_tokens=256)
    plan = runs.plan_capture(request)
    written = sum(file.stat().st_size for file in run(request).glob("*.safetensors"))
    assert plan.num_bytes <= written <= plan.num_bytes + 4000
    screen = words_of(plan_document(plan, request, View()))
    for words in ("boundary-report and explain need", "--keep hidden"):
        assert screen.count(words) == (keep != "hidden")
    assert ("expert numbers only" in screen) == (keep == "ids")


def words_of(document: Document) -> str:
    return " ".join(render(document, "table", View(80)).split())


def test_few_documents_are_said_as_soon_as_they_are_counted(balanced, text, tmp_path):
    """One file of text is one document, and leaves every test on tokens open."""
    (tmp_path / "one.txt").write_text("A single text. " * 4)
    lines = text.read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "three.jsonl").write_text("".join(lines[:3]), "utf-8")
    (tmp_path / "enough.jsonl").write_text("".join(lines[:16]), "utf-8")
    few = "2 are needed, 16 better (a text file is one document"
    for name, before, after in (("one.txt", 1, 0), ("three.jsonl", 0, 1), ("enough.jsonl", 0, 0)):
        request = request_of(balanced, tmp_path / name, tmp_path / f"rec_{name}", keep="ids")
        plan = runs.plan_capture(request)
        assert words_of(plan_document(plan, request, View())).count(few) == before, name
        recorded = runs.capture(request, plan)
        assert words_of(captured_document(recorded, request, View())).count(few) == after, name


def test_tokens_of_text_are_those_of_its_pieces_up_to_a_number(balanced, text, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100, "utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "yy"}\n\n{"text": "z", "domain": "d"}\n', "utf-8")
    both = (f"long={tmp_path / 'a.txt'}", str(tmp_path / "b.jsonl"))
    request = request_of(balanced, text, tmp_path / "rec", keep="ids", length=40, text=both)
    found = open_tokens(run(request))
    columns = found.read_columns(0, 103)
    assert columns.document.tolist() == [0] * 100 + [1, 1, 2]
    assert columns.position.tolist() == [*range(100), 0, 1, 0]
    assert columns.token_id.tolist() == [120] * 100 + [121, 121, 122]
    named = [found.facts.domains[d] if d >= 0 else None for d in columns.domain]
    assert named == ["long"] * 100 + [None, None, "d"]
    documents = runs.read_documents(
        (TextFile(tmp_path / "a.txt"),), lambda text: list(text.encode())
    )
    pieces = list(runs.cut(documents, 40, 55))
    assert [(p.position, len(p.token_ids)) for p in pieces] == [(0, 40), (40, 15)]
    (tmp_path / "a=b").write_text("", "utf-8")
    assert TextFile.of("code=x.txt") == TextFile(Path("x.txt"), "code")
    assert TextFile.of(str(tmp_path / "a=b")) == TextFile(tmp_path / "a=b")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "a.jsonl, line 2: list; expected an object"),
        ("a.jsonl", b'{"body": "a"}\n', "line 1: found body; expected text or token_ids"),
        ("a.jsonl", b'{"token_ids": [1, -2]}\n', "found token_ids; expected text or token_ids"),
        ("a.jsonl", b'{"token_ids": [true]}\n', "expected text or token_ids"),
        ("a.jsonl", b"\xff\n", "line 1: is not UTF-8"),
        ("a.jsonl", b'{"text": "a", "domain": 3}\n', "domain 3; expected a text"),
        ("a.txt", b"ab\xff", "no UTF-8 text (byte 2)"),
    ],
)
def test_text_that_is_none_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordingError) as found:
        list(runs.read_documents((TextFile(tmp_path / name),), lambda text: [1]))
    assert message in found.value.message


NOWHERE = ("nowhere.txt",)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": None}, UsageError, "no tokenizer that transformers can load"),
        ({"dtype": "int3"}, UsageError, "--dtype int3"),
        ({"keep": "logits", "fold": True}, UsageError, "--fold measures router inputs"),
        ({"model": Path("nowhere")}, CheckpointError, "no such file or folder"),
        ({"text": ()}, UsageError, "no text to read"),
        ({"num_tokens": 10**15}, UsageError, "GB are to be written; the disk has"),
        ({"text": NOWHERE}, RecordingError, "nowhere.txt: cannot be read"),
    ],
)
def test_what_cannot_be_captured_is_refused(balanced, text, tmp_path, options, error, message):
    with pytest.raises(error) as found:
        run(request_of(balanced, text, tmp_path / "rec", **options))
    assert message in found.value.message
    assert not list(tmp_path.glob("rec*"))


class Ends:
    def __init__(self, num_texts: int) -> None:
        self.left = num_texts

    def start(self, num_tokens: int, unit: str = "") -> None: ...

    def begin(self, what: str) -> None: ...

    def advance(self, num_tokens: int) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_capture_that_was_ended_goes_on_to_the_same_bytes(balanced, text, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_SHARD_BYTES", 1)
    monkeypatch.setattr(recorder, "_LEAST_TOKENS", 128)
    whole = request_of(balanced, text, tmp_path / "whole", keep="hidden", num_tokens=512)
    assert open_tokens(run(whole)).facts.num_tokens == 512
    for name in ("resumed", "restarted"):
        request = dataclasses.replace(whole, out=tmp_path / name)
        with pytest.raises(KeyboardInterrupt):
            runs.capture(request, runs.plan_capture(request), Ends(5))
        other = dataclasses.replace(request, keep="ids")
        with pytest.raises(UsageError, match="holds an unfinished recording of something else"):
            run(other)
        if name == "restarted":
            assert open_tokens(run(dataclasses.replace(other, restart=True))).facts.stage == "ids"
            continue
        assert runs.capture(request, runs.plan_capture(request)).num_resumed >= 128
        for path in whole.out.iterdir():
            assert (request.out / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_screen_says_what_was_written_and_what_to_do(balanced, text, monkeypatch, capsys):
    monkeypatch.chdir(text.parent)
    monkeypatch.setenv("COLUMNS", "100")
    options = ("--text", text.name, "--tokenizer", "bytes", "--out", "rec")
    code = exit_code(["capture", str(balanced.path), *options])
    screen = capsys.readouterr()
    assert code == 0, screen.err
    assert "wrote    4,096 tokens in 64 documents" in screen.out
    assert f"next     moegeom scan {balanced.path} --tokens rec" in screen.out
    total = sum(file.stat().st_size for file in (text.parent / "rec").iterdir())
    assert total > 4096 * 204  # bytes that its plan says of a token


@given(st.lists(st.integers(0, 900), min_size=1, max_size=40), st.integers(1, 9000))
def test_tokens_are_spread_over_documents_and_short_ones_leave_theirs_to_the_next(sizes, total):
    documents = [runs.TextDocument(tuple(range(size)), None) for size in sizes]
    pieces = list(runs.cut(iter(documents), 64, total, len(sizes)))
    lengths = [0] * len(sizes)
    for piece in pieces:
        assert piece.position == lengths[piece.document]
        lengths[piece.document] += len(piece.token_ids)
    assert all(mine <= whole for mine, whole in zip(lengths, sizes, strict=True))
    assert sum(lengths) <= total
    even = total // len(sizes)
    if even >= 256:
        assert all(
            mine >= min(whole, even) or sum(lengths) == total
            for mine, whole in zip(lengths, sizes, strict=True)
        )
    capped = list(runs.cut(iter(documents), 64, total, len(sizes), 10))
    assert all(piece.position + len(piece.token_ids) <= 10 for piece in capped)


def test_text_is_looked_at_before_the_model(balanced, tmp_path, monkeypatch):
    monkeypatch.setattr("moegeom.recorder.run._load", lambda request: pytest.fail("model loaded"))
    (tmp_path / "empty.txt").write_text(" \n")
    for text, words in ((tmp_path / "empty.txt", "holds no text"), (tmp_path, "a folder")):
        with pytest.raises(RecordingError, match=words):
            run(request_of(balanced, text, tmp_path / "out"))
