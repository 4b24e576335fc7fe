"""No name of others reaches a terminal, a page or a workflow as more than text, in any report.

Every function that makes a document is shown by every renderer: a new study or format is looked at
without a line here. Records are made from their types, every string of them hostile, but for the
words of closed lists.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import html.parser
import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from markdown_it import MarkdownIt
from safetensors.numpy import load_file, save_file

import moegeom
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import InternalError
from moegeom.core.finding import Verdict
from moegeom.core.router import RouterSet
from moegeom.document.model import Document, View
from moegeom.document.render import RENDERERS, render
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, refuse_disproved, scan
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.testing.synthetic import write_checkpoint
from tests.unit.check.conftest import GATE, Case
from tests.unit.document.conftest import HOSTILE, written_by_others
from tests.unit.document.records import SAMPLE, sample_run

HOUSE = Path(moegeom.__file__).parent

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


#: Packages with modules that tell records as documents.
TELLERS = ("moegeom.studies", "moegeom.studies.cells", "moegeom.recorder", "moegeom.document")


def documents() -> dict[str, Callable[..., Document]]:
    """Every function that returns a document, by where it is."""
    found = {}
    for package in map(importlib.import_module, TELLERS):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            is_told = info.name.endswith(".document") or package.__name__ == "moegeom.document"
            if info.ispkg or not is_told:
                continue
            module = importlib.import_module(info.name)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                makes = inspect.get_annotations(function).get("return") == "Document"
                if makes and function.__module__ == info.name:
                    found[f"{info.name}.{name}"] = function
    return found


DOCUMENTS = documents()
JUDGES = [
    "moegeom.studies.check.document.document",
    "moegeom.studies.track.document.document",
]
CASES = [
    (kind, renderer.name)
    for kind in DOCUMENTS
    for renderer in RENDERERS.all()
    if kind in JUDGES or not renderer.of_verdicts
]


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
        return Path(NAME)
    if kind is Verdict:  # one check in each state
        return written_by_others(NAME)[0]
    if kind is Results:  # its tables are shown by the report of a scan
        return Results(None, run(), {})
    if kind is RouterSet:  # arrays that fit together
        routers = load_routers(open_checkpoint(SAMPLE / "step_1500"))
        return dataclasses.replace(routers, checkpoint=NAME, family=NAME, family_text=NAME)
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
            return run()["run_b"]
        if args and args[1] is Any:
            return row()
        return {NAME: made(args[1], field)}
    if origin is np.ndarray or kind is np.ndarray:
        return np.full(2, 0.25)
    if hasattr(kind, "array_type"):  # of jaxtyping
        return np.full([2] * len(kind.dims), 0.25).astype(kind.dtypes[0])
    if dataclasses.is_dataclass(origin or kind):
        return record(origin or kind)
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
        "run_b": other | {"notes": [""], "fits": []},
        "checkpoint_b": against | lists,
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


@pytest.fixture(scope="module")
def told(results) -> Callable[..., Document]:
    """A document of hostile records; each is made once."""
    kept: dict[str, list[Any]] = {}

    def document(kind: str, view: View) -> Document:
        function = DOCUMENTS[kind]
        if kind not in kept:
            hints = typing.get_type_hints(function)
            asked = [name for name in inspect.signature(function).parameters if name != "view"]
            kept[kind] = [
                results if hints[name] is Results else made(hints[name], name) for name in asked
            ]
        return function(*kept[kind], view)

    return document


@pytest.fixture
def shown(told):
    """The text of a document of hostile records."""

    def text(kind: str, form: str, **view: Any) -> str:
        return render(told(kind, View(**view)), form, View(**view))

    return text


def cases(form: str) -> list[str]:
    """Documents that a renderer shows."""
    return [kind for kind, name in CASES if name == form]


def test_every_function_that_makes_a_document_is_looked_at():
    """As many as the source has."""
    written = [
        f"{'.'.join(('moegeom', *file.relative_to(HOUSE).with_suffix('').parts))}.{name}"
        for file in HOUSE.rglob("*.py")
        if "moegeom.document.model import" in (text := file.read_text("utf-8"))
        for name in re.findall(r"^def (\w+)\([^)]*\) -> Document:", text, re.MULTILINE)
    ]
    assert sorted(DOCUMENTS) == sorted(written)
    assert {kind.rsplit(".", 1)[1] for kind in DOCUMENTS} >= {"document", "results_document"}
    assert len(JUDGES) == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("width", [80, 140])
def test_no_control_character_reaches_the_output(shown, kind, form, width):
    for every in (False, True):
        text = shown(kind, form, width=width, detail=every)
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert "pwned" in text.lower(), "the names are not shown: nothing was tested"


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_with_colours_nothing_but_colours_is_sent(shown, kind):
    text = shown(kind, "table", width=100, colours=True)
    rest = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [c for c in rest if not c.isprintable() and c != "\n"] == []


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_no_name_begins_a_command_of_a_workflow(shown, kind, form):
    text = shown(kind, form, width=80, detail=True)
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


@pytest.mark.parametrize("kind", cases("md"))
def test_markdown_holds_no_markup_of_names(shown, kind):
    text = shown(kind, "md", detail=True)
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inner = [child for token in tokens for child in (token.children or ())]
    markup = [t.content for t in (*tokens, *inner) if t.type in ("html_block", "html_inline")]
    allowed = r"(</?(details|summary)>|[^<>])*"
    assert [content for content in markup if not re.fullmatch(allowed, content)] == []
    assert not {t.type for t in inner} & {"link_open", "image", "s_open", "em_open"}
    bold, depth = [], 0
    for token in inner:
        depth += {"strong_open": 1, "strong_close": -1}.get(token.type, 0)
        bold += [token.content] if depth and token.type == "text" else []
    assert "pwned" not in bold


#: Attributes of the shapes of figures; what would run or load is none of them.
DRAWN = {
    *"href download viewbox role aria-label x y cx cy r width height d fill fill-opacity".split(),
    *"stroke-width stroke-linecap stroke-opacity transform text-anchor font-weight".split(),
    "preserveaspectratio",
}


class Page(html.parser.HTMLParser):
    """Names of all tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("kind", cases("html"))
def test_a_page_holds_no_tag_of_names(shown, kind):
    page = Page()
    page.feed(shown(kind, "html", detail=True))
    page.close()
    ours = "html head meta title style body h1 h2 section details summary p b br span code dl dt dd"
    drawn = "figure figcaption div a svg text path rect circle g image"
    assert page.tags <= {*ours.split(), *drawn.split(), *"table thead tbody tr th td".split()}
    told = {"lang", "charset", "http-equiv", "content", "name", "class", "id", "title"}
    assert {name for name in page.attributes if name not in told} <= DRAWN


@pytest.mark.parametrize("kind", cases("json"))
def test_json_is_one_document_that_holds_the_names_as_they_are(shown, kind):
    document = json.dumps(json.loads(shown(kind, "json")), ensure_ascii=False)
    assert "pwned" in document


@pytest.mark.parametrize("kind", cases("junit"))
def test_junit_is_xml(shown, kind):
    ET.fromstring(shown(kind, "junit"))


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_name_longer_than_the_screen_is_shown(shown, kind):
    assert shown(kind, "table", width=40)


def test_neither_documents_nor_renderers_raise():
    files = {Path(sys.modules[one.__module__].__file__) for one in DOCUMENTS.values()}
    files |= set((HOUSE / "document/renderers").glob("*.py"))
    assert len(files) > 10
    assert [p.name for p in files if re.search(r"^\s+raise ", p.read_text("utf-8"), re.M)] == []


def test_tokens_that_flipped_against_a_proof_end_the_scan_and_not_its_report():
    with pytest.raises(InternalError, match="3 tokens flipped that were proved to stay"):
        refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 3}])
    refuse_disproved([{"router": "text/0", "variant": "bf16", "num_disproved": 0}, {}])
