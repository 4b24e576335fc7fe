"""No name of others reaches a terminal, Markdown or a workflow as more than text, in any report.

Kinds of reports are the registries below ``moegeom.document``, formats their names: a new kind or
format is looked at without a line here. Records are made from their types, every string of them
hostile, but for the words of closed lists.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import json
import pkgutil
import re
import types
import typing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from markdown_it import MarkdownIt
from safetensors.numpy import load_file, save_file

import moegeom.document
from moegeom.core.errors import InternalError
from moegeom.core.registry import Registry
from moegeom.document import View
from moegeom.document._reporter import Reporter
from moegeom.document._verdict_reporter import VerdictReporter
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, refuse_disproved, scan
from moegeom.results.reader import Results, open_results
from moegeom.studies.boundary.record import Exposure
from moegeom.testing.synthetic import write_checkpoint
from tests.unit.check.conftest import GATE, Case
from tests.unit.report.conftest import HOSTILE
from tests.unit.report.records import sample_run

#: Escape sequences, new lines, text that runs backwards, HTML, Markdown, commands of workflows.
NAME = (
    f"text/0/x\x1b]0;PWNED\x07\x1b[31m\r\n::error file=a::pwned ##[error]pwned %0A::error::pwned "
    f"\u202e\u2066\x9b31m <img src=x onerror=alert(1)> **pwned** {HOSTILE}"
)

#: Words that facts of a run may hold, by their key; everything else in it is hostile.
VOCABULARY = {
    *("stage", "fingerprint", "score", "stored_dtype", "bias_dtype", "group_fill", "trust"),
    *("severity", "variant", "population", "ties", "device"),
}


def kinds() -> dict[str, tuple[Registry[Any], type]]:
    """Every registry of reporters, with the record that they show."""
    found = {}
    for info in pkgutil.walk_packages(moegeom.document.__path__, "moegeom.document."):
        module = importlib.import_module(info.name)
        for name in getattr(module, "__annotations__", {}):
            value = getattr(module, name, None)
            if not isinstance(value, Registry):
                continue
            (of,) = typing.get_args(typing.get_type_hints(module)[name])
            if of is VerdictReporter:
                found[name] = (value, VerdictReporter)
            elif typing.get_origin(of) is Reporter:
                found[name] = (value, typing.get_args(of)[0])
    return found


KINDS = kinds()
CASES = [(kind, form) for kind, (registry, _) in KINDS.items() for form in registry.names()]


#: Fields that hold a word of a closed list although their type does not say so.
WORDS = {"road": "sweep"}


def row() -> dict[str, Any]:
    """A row of results with every column of every metric; names are hostile, numbers numbers."""
    columns = [
        column for metric in METRICS.all() for table in metric.columns.values() for column in table
    ]
    numbers = {c.name: 0.25 for c in columns if c.kind in ("float", "int")}
    names = {"router": NAME, "name": NAME, "reason": NAME, "text": NAME, "population": "all"}
    pairs = {"first": 1, "second": 2, "share": 0.25}
    return numbers | names | pairs | {"engine": NAME, "version": NAME, "variant": "as_stored"}


def hostile(value: Any, key: str = "") -> Any:
    """The same facts with every string that is no word of a closed list replaced."""
    if isinstance(value, str):
        return value if key in VOCABULARY else NAME
    if isinstance(value, collections.abc.Mapping):
        return {name: hostile(entry, name) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [hostile(entry, key) for entry in value]
    return value


def made(kind: Any, field: str = "") -> Any:
    """A value of a type: the first of a closed list, two of everything that there can be many of."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return WORDS.get(field, NAME)
    if kind is bool:
        return True
    if kind in (int, float):
        return 2 if kind is int else 0.25
    if kind in (Any, object):
        return NAME
    if kind is Path:
        return Path("x")
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return made(next(one for one in args if one is not type(None)), field)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return (made(args[0], field), made(args[0], field))
        return tuple(made(one, field) for one in args)
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        return [made(args[0], field) if args else NAME] * 2
    if origin in (dict, collections.abc.Mapping):
        if field == "run":
            return run()
        if field == "other":
            return run()["other"]
        if args and args[1] is Any:
            return row()
        return {NAME: made(args[1], field)}
    if origin is np.ndarray or kind is np.ndarray:
        return np.full(2, 0.25)
    if dataclasses.is_dataclass(kind):
        return record(kind)
    return made(typing.get_args(kind)[0], field) if args else NAME


def record(kind: Any) -> Any:
    """A record of a type, every field of it made."""
    hints = typing.get_type_hints(kind)
    fields = {
        field.name: made(hints[field.name], field.name)
        for field in dataclasses.fields(kind)
        if field.init
    }
    return kind(**fields)


def run() -> dict[str, Any]:
    """Facts of a run that compared with another run and another checkpoint, and added noise."""
    other = {"name": "", "engine": "", "stage": "ids", "num_tokens": 2, "num_matched": 2}
    against = {"name": "", "rule": "", "has_same_rule": False, "num_compared": 2}
    lists = {"equal": [""], "regained": [""], "unknown_gain": [""]}
    facts = {
        "other": other | {"notes": [""], "fits": []},
        "against": against | lists,
        "noise": {"scale": 0.1},
        "next_command": "moegeom explain",
    }
    return hostile(sample_run() | facts)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Results of a checkpoint whose folder and tensors are named so that they do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    name = re.sub(r"[/\x00\ud800]", "", NAME)[:80]
    model = write_checkpoint(folder / name, Case().model)
    tensors = load_file(model / "model.safetensors")
    for number in range(2):
        tensors[f"{NAME.replace(chr(0xD800), '')}layers.{number}.mlp.gate.weight"] = np.zeros(
            (4, 4), np.float32
        )
    tensors[GATE.format(1)][2] = 0.0  # something to find
    save_file(tensors, model / "model.safetensors")
    return open_results(scan(ScanRequest(str(model), out=folder / "out")))


@pytest.fixture
def shown(results, of_others):
    """The text of a report of a hostile record."""

    def text(kind: str, form: str, **view: Any) -> str:
        registry, of = KINDS[kind]
        if of is VerdictReporter:
            return registry[form].render(*of_others(NAME), View(**view))
        found = results if of is Results else record(of)
        return registry[form].render(found, View(**view))

    return text


def test_all_kinds_of_reports_are_found():
    """As many as there are folders with plug-ins that render text for a screen."""
    folders = {
        path.parent.name
        for path in Path(moegeom.document.__file__).parent.glob("*/*.py")
        if "REPORTER = " in path.read_text("utf-8")
    }
    assert len(KINDS) == len(folders) >= 9


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("width", [80, 140])
def test_no_control_character_reaches_the_output(shown, kind, form, width):
    for every in (False, True):
        text = shown(kind, form, width=width, all_layers=every)
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert "pwned" in text.lower(), "the names are not shown: nothing was tested"


@pytest.mark.parametrize(("kind", "form"), [case for case in CASES if case[1] == "table"])
def test_with_colours_nothing_but_colours_is_sent(shown, kind, form):
    text = shown(kind, form, width=100, colours=True)
    rest = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [c for c in rest if not c.isprintable() and c != "\n"] == []


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_no_name_begins_a_command_of_a_workflow(shown, kind, form):
    text = shown(kind, form, width=80, all_layers=True)
    if form == "github":
        # a line break that the runner would decode is ours, never one of a name
        assert "%0A::" not in text.replace("%250A", "")
        assert all(
            re.match(r"::(error|warning|notice) title=[^:]*::", line) for line in text.splitlines()
        )
        return
    if form != "json":
        assert "##[" not in text
    assert [line for line in text.splitlines() if line.strip().startswith("::")] == []


@pytest.mark.parametrize(("kind", "form"), [case for case in CASES if case[1] == "md"])
def test_markdown_holds_no_markup_of_names(shown, kind, form):
    text = shown(kind, form, all_layers=True)
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inner = [child for token in tokens for child in (token.children or ())]
    html = [t.content for t in (*tokens, *inner) if t.type in ("html_block", "html_inline")]
    allowed = r"\s*(</?(details|summary)>|All checks \(\d+\)|\s)*"
    assert [content for content in html if not re.fullmatch(allowed, content)] == []
    assert not {t.type for t in inner} & {"link_open", "image", "s_open", "em_open"}
    bold, depth = [], 0
    for token in inner:
        depth += {"strong_open": 1, "strong_close": -1}.get(token.type, 0)
        bold += [token.content] if depth and token.type == "text" else []
    assert "pwned" not in bold


@pytest.mark.parametrize("kind", [kind for kind, form in CASES if form == "json"])
def test_json_is_one_document_that_holds_the_names_as_they_are(shown, kind):
    document = json.dumps(json.loads(shown(kind, "json")), ensure_ascii=False)
    assert "pwned" in document


def test_junit_is_xml(shown):
    ET.fromstring(shown("VERDICT_REPORTERS", "junit"))


def test_a_name_longer_than_the_screen_is_shown():
    for kind, (registry, of) in KINDS.items():
        if of not in (Results, VerdictReporter):
            assert registry["table"].render(record(of), View(40)), kind


def test_a_renderer_never_raises():
    folder = Path(moegeom.document.__file__).parent
    renderers = [p for p in folder.glob("*/*.py") if "REPORTER = " in p.read_text("utf-8")]
    renderers += folder.glob("*/_wording.py")
    assert len(renderers) > 25
    assert [p.name for p in renderers if re.search(r"^\s+raise ", p.read_text("utf-8"), re.M)] == []


def test_tokens_that_switched_against_a_proof_end_the_scan_and_not_its_report():
    with pytest.raises(InternalError, match="3 tokens switched that were proved to stay"):
        refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 3}])
    refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 0}, {}])
    page = KINDS["EXPOSURE_REPORTERS"][0]["md"].render(record(Exposure), View())
    assert "tokens switched that were proved to stay" in page
