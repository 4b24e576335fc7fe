"""No name of others reaches a terminal, a page or a workflow as more than text, in any report.

Every function that makes a document is shown by every renderer: a new study or format is looked at
without a line here. Records are made from their types, every string of them hostile, but for the
words of closed lists.
"""

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import itertools
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
from moegeom.core.finding import Verdict
from moegeom.core.router import RouterSet
from moegeom.document.model import Document, View
from moegeom.document.render import RENDERERS, render
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import Results, open_results
from moegeom.router.load import load_routers
from moegeom.studies.faults.score import Fault
from moegeom.testing.synthetic import write_checkpoint
from tests.by_day import by_day
from tests.unit.check.conftest import GATE, Case
from tests.unit.document.conftest import HOSTILE, written_by_others
from tests.unit.document.pages import Page
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
TELLERS = (
    *("moegeom.studies", "moegeom.research", "moegeom.routing_cells"),
    *("moegeom.recorder", "moegeom.document"),
)


def documents() -> dict[str, Callable[..., Document]]:
    """Every function that returns a document, but for frames that others fill in, by where it is."""
    found = {}
    for package in map(importlib.import_module, TELLERS):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            file = HOUSE.parent.joinpath(*info.name.split(".")).with_suffix(".py")
            if info.ispkg or "-> Document:" not in file.read_text("utf-8"):
                continue
            module = importlib.import_module(info.name)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                makes = inspect.get_annotations(function).get("return") == "Document"
                is_frame = "sections" in inspect.signature(function).parameters
                if makes and not is_frame and function.__module__ == info.name:
                    found[f"{info.name}.{name}"] = function
    return found


DOCUMENTS = documents()
JUDGES = ["moegeom.studies.check.document.document", "moegeom.studies.track.document.document"]

#: Widths, and whether all details are shown.
VIEWS = by_day(
    itertools.product([80, 140], [False, True]), {"page": (140, False), "details": (80, True)}
)


def kinds_of(form: str) -> list[str]:
    """Documents that a renderer shows."""
    return JUDGES if RENDERERS[form].of_verdicts else [*DOCUMENTS]


#: Values of plain types; a verdict has one check in each state.
PLAIN = {bool: True, int: 2, float: 0.25, Any: NAME, object: NAME, Path: Path(NAME)}
PLAIN |= {Verdict: written_by_others(NAME)[0], np.ndarray: np.full(2, 0.25)}

#: Fields that hold a word of a closed list although their type does not say so.
WORDS = {"road": "sweep", "device": "cpu", "CauseVerdict.cause": "inconclusive"}
WORDS |= {"RouterImbalance.cause": "rows", "Evening.meaning": "partly"}


def row() -> dict[str, Any]:
    """A row of results with every column of every metric; names are hostile, numbers numbers."""
    tables = [table for metric in METRICS.all() for table in metric.columns.values()]
    numbers = {c.name: 0.25 for table in tables for c in table if c.kind in ("float", "int")}
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
    if isinstance(kind, type) and kind in PLAIN:
        return PLAIN[kind]
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
        each = (args[0], args[0]) if args[1:] == (Ellipsis,) else args
        return tuple(made(one, field) for one in each)
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        return [made(args[0], field) if args else NAME] * 2
    if origin in (dict, collections.abc.Mapping):
        if field in ("run", "other"):
            return run() if field == "run" else run()["run_b"]
        if args and args[1] is Any:
            return row()
        keys = typing.get_args(args[0]) or [NAME]  # of a closed list, or any
        return {key: made(args[1], field) for key in keys}
    if origin is np.ndarray:
        return PLAIN[origin]
    if hasattr(kind, "array_type"):  # of jaxtyping
        return np.full([2] * len(kind.dims), 0.25).astype(kind.dtypes[0])
    if dataclasses.is_dataclass(origin or kind) or hasattr(kind, "__struct_fields__"):
        return record(origin or kind)
    return made(args[0], field) if args else NAME


def record(kind: Any) -> Any:
    """A record of a type, every field of it made but for records of its own type, without end."""
    # an explanation names faults for its types alone
    hints = typing.get_type_hints(kind, localns={"Fault": Fault})
    names = getattr(kind, "__struct_fields__", ())
    names = names or [f.name for f in dataclasses.fields(kind) if f.init]
    names = [name for name in names if kind not in typing.get_args(hints[name])]
    words = {name: WORDS.get(f"{kind.__name__}.{name}") for name in names}
    return kind(**{name: word or made(hints[name], name) for name, word in words.items()})


def run() -> dict[str, Any]:
    """Facts of a run that compared with another run and another checkpoint, and added noise."""
    other = {"name": "", "engine": "", "stage": "ids", "num_tokens": 2, "num_matched": 2}
    against = {"name": "", "rule": "", "has_same_rule": False, "num_compared": 2}
    lists = {"equal": [""], "regained": [""], "unknown_gain": [""]}
    runs = {"run_b": other | {"notes": [""], "fits": []}, "checkpoint_b": against | lists}
    facts = {"noise": {"scale": 0.1}, "next_command": "moegeom explain"}
    return hostile(sample_run() | runs | facts)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Results of a checkpoint whose folder and tensors are named so that they do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    name = re.sub(r"[/\x00\ud800]", "", NAME)[:80]
    model = write_checkpoint(folder / name, Case().model)
    tensors = load_file(model / "model.safetensors")
    for number in range(2):
        gate = f"{NAME.replace(chr(0xD800), '')}layers.{number}.mlp.gate.weight"
        tensors[gate] = np.zeros((4, 4), np.float32)
    tensors[GATE.format(1)][2] = 0.0  # something to find
    save_file(tensors, model / "model.safetensors")
    return open_results(scan(ScanRequest(str(model), out=folder / "out")))


@pytest.fixture(scope="module")
def shown(results) -> Callable[..., str]:
    """The text of a document of hostile records."""

    @functools.cache
    def arguments(kind: str) -> list[Any]:
        function = DOCUMENTS[kind]
        hints = typing.get_type_hints(function)
        names = [name for name in inspect.signature(function).parameters if name != "view"]
        return [results if hints[name] is Results else made(hints[name], name) for name in names]

    @functools.cache
    def text(kind: str, form: str, width: int = 80, detail: bool = True, **more: bool) -> str:
        view = View(width, detail=detail, **more)
        return render(DOCUMENTS[kind](*arguments(kind), view), form, view)

    return text


def test_every_function_that_makes_a_document_is_looked_at():
    """As many as the source has; frames take sections of others."""
    written = [
        f"{'.'.join(('moegeom', *file.relative_to(HOUSE).with_suffix('').parts))}.{name}"
        for file in HOUSE.rglob("*.py")
        if "moegeom.document.model import" in (text := file.read_text("utf-8"))
        for name in re.findall(
            r"^def (\w+)\((?![^)]*\*sections)[^)]*\) -> Document:", text, re.MULTILINE
        )
    ]
    assert sorted(DOCUMENTS) == sorted(written)
    assert {kind.rsplit(".", 1)[1] for kind in DOCUMENTS} >= {"document", "results_document"}
    assert {*JUDGES} < {*DOCUMENTS}


def is_clean(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("form", RENDERERS.names())
def test_no_control_character_reaches_the_output_and_names_do(shown, form):
    offenders = [
        (kind, view)
        for kind in kinds_of(form)
        for view in VIEWS
        if not is_clean(text := shown(kind, form, *view)) or "pwned" not in text.lower()
    ]
    assert offenders == []


def test_with_colours_nothing_but_colours_is_sent(shown):
    def plain(kind: str) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", shown(kind, "table", 100, False, colours=True))

    assert [kind for kind in DOCUMENTS if not is_clean(plain(kind))] == []


def test_a_name_longer_than_the_screen_is_shown(shown):
    assert [kind for kind in DOCUMENTS if not shown(kind, "table", 40, False)] == []


@pytest.mark.parametrize("form", sorted({*RENDERERS.names()} - {"github"}))
def test_no_name_begins_a_command_of_a_workflow(shown, form):
    commands = r"^\s*::" if form == "json" else r"^\s*::|##\["
    texts = {kind: shown(kind, form) for kind in kinds_of(form)}
    assert [kind for kind in texts if re.search(commands, texts[kind], re.MULTILINE)] == []


def test_no_name_ends_a_command_of_ours(shown):
    ours = r"::(error|warning|notice) title=[^:]*::"
    for kind in kinds_of("github"):
        text = shown(kind, "github")
        # a line break that the runner would decode is ours, never one of a name
        assert "%0A::" not in text.replace("%250A", ""), kind
        assert [line for line in text.splitlines() if not re.match(ours, line)] == [], kind


def test_markdown_holds_no_markup_of_names(shown):
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for kind in kinds_of("md"):
        tokens = parser.parse(shown(kind, "md"))
        inner = [child for token in tokens for child in (token.children or ())]
        markup = [t.content for t in (*tokens, *inner) if t.type in ("html_block", "html_inline")]
        allowed = r"(</?(details|summary)>|[^<>])*"
        assert [content for content in markup if not re.fullmatch(allowed, content)] == [], kind
        assert not {t.type for t in inner} & {"link_open", "image", "s_open", "em_open"}, kind
        bold, depth = [], 0
        for token in inner:
            depth += {"strong_open": 1, "strong_close": -1}.get(token.type, 0)
            bold += [token.content] if depth and token.type == "text" else []
        assert "pwned" not in bold, kind


#: Tags and attributes of pages; what would run or load is none of them.
TAGS = {
    *"html head meta title style body h1 h2 section details summary p b br span code dl dt dd".split(),
    *"figure figcaption div a svg text path rect circle g image".split(),
    *"table thead tbody tr th td".split(),
}
ATTRIBUTES = {
    *"lang charset http-equiv content name class id title href download viewbox role".split(),
    *"aria-label x y cx cy r width height d fill fill-opacity stroke-width stroke-linecap".split(),
    *"stroke-opacity transform text-anchor font-weight preserveaspectratio".split(),
}


def test_a_page_holds_no_tag_of_names(shown):
    pages = {kind: Page(shown(kind, "html")) for kind in kinds_of("html")}
    foreign = {
        kind: ({*page.tags} - TAGS, {*page.attributes} - ATTRIBUTES) for kind, page in pages.items()
    }
    assert {kind: names for kind, names in foreign.items() if names != (set(), set())} == {}


def test_json_holds_the_names_as_they_are_and_junit_is_xml(shown):
    for kind in kinds_of("json"):
        assert "pwned" in json.dumps(json.loads(shown(kind, "json")), ensure_ascii=False), kind
    for kind in kinds_of("junit"):
        ET.fromstring(shown(kind, "junit"))


def test_neither_documents_nor_renderers_raise():
    files = {Path(sys.modules[one.__module__].__file__) for one in DOCUMENTS.values()}
    files |= set((HOUSE / "document/renderers").glob("*.py"))
    assert len(files) > 10
    assert [p.name for p in files if re.search(r"^\s+raise ", p.read_text("utf-8"), re.M)] == []
