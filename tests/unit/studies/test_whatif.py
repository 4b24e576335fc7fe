"""What ``moegeom whatif`` is asked, and what it says of what was tried."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moegeom as mg
from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.core.errors import RecordingError, ResultsError, UsageError
from moegeom.core.row_keys import AS_STORED, RANDOM, SIDES, is_random
from moegeom.studies.whatif.document import document, what_if_figures
from moegeom.studies.whatif.record import Tried, WhatIfReport
from moegeom.studies.whatif.study import MOST, read_grid
from moegeom.tokens.sources.recorded import open_recording
from moegeom.variants.what_if import WHAT_IFS, Parameter, parse_what_ifs, spelled
from tests.by_day import IS_NIGHT
from tests.unit.studies.samples import COLLAPSED, sides, worded

CKPT, REC = sides(COLLAPSED)

#: Imported before examples are drawn.
KINDS = {kind.name: kind for kind in WHAT_IFS.all()}

#: The two that are refused last.
ASKED = ("topk:2", "smooth:extra=0.5", "without:5", "capacity:1", "topk:99", "without:16")


def numbers_of(parameter: Parameter) -> st.SearchStrategy[str]:
    if parameter.words:
        return st.sampled_from(parameter.words)
    least, most = max(parameter.least, -1e12), min(parameter.most, 1e12)
    if parameter.is_whole:
        return st.integers(int(least), int(most)).map(str)
    return st.floats(least, most).map(repr)


@st.composite
def specs(draw: Any) -> str:
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    names = {p.name for p in kind.parameters if p.name not in kind.one_of and draw(st.booleans())}
    if kind.one_of:
        names.add(draw(st.sampled_from(kind.one_of)))
    words = []
    for parameter in draw(st.permutations(kind.parameters)):
        if parameter.name not in names:
            continue
        most = 3 if parameter.is_list or parameter.is_swept else 1
        values = draw(st.lists(numbers_of(parameter), min_size=1, max_size=most))
        words += [f"{parameter.name}={values[0]}", *values[1:]]
    name = draw(st.sampled_from([kind.name, spelled(kind)]))
    return f"{name}:{draw(st.sampled_from([',', ' , '])).join(words)}" if words else name


@given(specs())
@example("temperature:0.12345678,0.12345679")
@example("without:7,3,3")
@example("jitter:-0.0")
def test_what_is_asked_is_named_so_that_the_name_asks_for_it_again(text):
    asked = parse_what_ifs([text])
    for one in asked:
        (again,) = parse_what_ifs([one.name])
        assert (again.name, again.kind.name) == (one.name, one.kind.name)
        assert again.values == one.values
        assert "-0" not in one.name.replace("e-0", "")
    distinct = {(one.kind.name, *map(repr, one.values.values())) for one in asked}
    assert len(distinct) == len(asked), "one name for two"


@settings(max_examples=1000 if IS_NIGHT else 30)
@given(st.text(max_size=30), st.sampled_from(WHAT_IFS.names()))
def test_any_text_is_a_what_if_or_one_sentence_with_a_hint(text, kind):
    for one in (text, f"{kind}:{text}"):
        try:
            parse_what_ifs([one])
        except UsageError as error:
            assert error.message.endswith((".", "?", spelled(WHAT_IFS[kind])))
            assert error.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smoth:extra=1", "Did you mean smooth"),
        ("topk", "it needs k"),
        ("topk:", "k is '', expected a whole number from 1 to 100000"),
        ("temperature", "it needs tau"),
        ("smooth", "either eps or extra"),
        ("smooth:eps=1,extra=1", "either eps or extra"),
        ("smooth:extra", "'extra' has no value"),
        ("smooth:eps=nan", "eps is 'nan'"),
        ("smooth:eps=1,eps=1", "'eps' is given twice"),
        ("smooth:eps=1,2", "'eps' has several values"),
        ("capacity:1,order=late", "expected position or score"),
        ("random:1", "'1' stands without a name"),
        ("without:-1", "expected a whole number from 0"),
    ],
)
def test_a_text_that_asks_for_nothing_says_what_is_wrong_with_it(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        parse_what_ifs([text])
    assert caught.value.hint


def test_no_what_if_has_the_name_of_what_every_scan_measures():
    names = {spelled(kind) for kind in WHAT_IFS.all()}
    assert not names & {AS_STORED, RANDOM, *SIDES}
    assert not any(map(is_random, names))
    report = mg.whatif(str(CKPT), str(REC), what_ifs="random", layers="0").value
    assert [one.name for one in report.tried] == ["random-rows"]


def test_an_error_repeats_little_of_what_was_typed():
    for text in ("x" * 10_000, "topk:" + "9" * 10_000, "topk:\x1b[31m2" * 1000):
        with pytest.raises(UsageError) as caught:
            parse_what_ifs([text])
        assert len(str(caught.value.message)) < 250


def grid(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "sweep.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_grid_multiplies_its_lists_out_table_by_table_if_it_is_a_file(tmp_path):
    found = read_grid(
        grid(
            tmp_path,
            "temperature = { tau = [0.5, 2] }\nwithout = { experts = '5,7' }\nrandom = {}\n"
            "[[smooth]]\neps = [0.02, 0.05]\nb = [9, 30]\n[[smooth]]\nextra = 1\n",
        )
    )
    assert [one.name for one in parse_what_ifs(found)] == [
        "temperature:0.5",
        "temperature:2",
        "without:5,7",
        "random-rows",
        "smooth:eps=0.02,b=9",
        "smooth:eps=0.02,b=30",
        "smooth:eps=0.05,b=9",
        "smooth:eps=0.05,b=30",
        "smooth:extra=1",
    ]
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot be read") as caught:
            read_grid(path)
        assert str(path) in caught.value.message
        assert "Errno" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no what-if"),
        ("[[[", "is not TOML"),
        (b"\xff", "not UTF-8 at byte 0"),
        ("topk = 2", "'topk' is no table"),
        ("topk = [2]", "'topk' is no table"),
        ("topk = { k = [] }", "topk.k is neither"),
        ("topk = { k = { a = 1 } }", "topk.k is neither"),
        ("topk = { k = 1979-05-27 }", "topk.k is neither"),
        ("topk = { k = true }", "k is 'True'"),
        ("topk = { q = 1 }", "it has no 'q'"),
        ("temperature = { tau = nan }", "tau is 'nan'"),
        ("smooth = { eps = [0.1, 0.2], q = [1] }", "it has no 'q'"),
        ("hopk = { k = 1 }", "Did you mean topk"),
        (f"temperature = {{ tau = {list(range(1, MOST + 2))} }}", f"more than {MOST}"),
        ("a." * 3000 + "b = 1", "dots"),
    ],
)
def test_what_is_no_grid_is_refused_in_a_sentence_with_a_hint(tmp_path, text, said):
    with pytest.raises(UsageError, match=said) as caught:
        read_grid(grid(tmp_path, text))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a what-if"),
        ({"what_ifs": "topk:2", "what_if_batch": 3}, "batch 3: expected a power of two"),
        ({"what_ifs": "topk:2", "what_if_batch": 0}, "batch 0: expected a power of two"),
        ({"what_ifs": "topk:2", "what_if_batch": 1 << 20}, "batch 1048576: expected a power"),
        ({"what_ifs": "topk:2", "arithmetics": "bf17"}, "Unknown arithmetic"),
        ({"what_ifs": [f"temperature:{1 + i / 1000}" for i in range(MOST + 1)]}, "more than 512"),
        ({"what_ifs": "topk:2", "tokens": None}, "needs recorded tokens"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_a_token_is_read(options, said):
    tokens = {"tokens": REC} | options
    with pytest.raises(UsageError, match=said) as caught:
        mg.whatif(CKPT, tokens.pop("tokens"), **tokens)
    assert caught.value.hint


def test_recordings_without_scores_of_all_experts_or_without_inputs_are_refused():
    random = np.random.default_rng(0)
    ids = {str(n): np.argsort(random.random((40, 16)), axis=1)[:, :4] for n in range(3)}
    with pytest.raises(RecordingError, match="holds ids; another router needs the scores"):
        mg.whatif(CKPT, ids, stage="ids", what_ifs="topk:2")
    logits = {str(n): random.standard_normal((40, 16)).astype(np.float32) for n in range(3)}
    with pytest.raises(RecordingError, match="follows from router inputs"):
        mg.whatif(CKPT, logits, stage="logits", what_ifs="topk:2", arithmetics="bf16-logits")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    source, out = open_recording(REC), tmp_path_factory.mktemp("whatif") / "results"
    values = {f"text/{n}": source.read_values(f"text/{n}", 0, 400) for n in (0, 2)}
    options = {"layers": "0,2", "stage": "router_input", "out": out}
    return mg.whatif(CKPT, values, what_ifs=ASKED, **options).value, out


@pytest.fixture
def record(results):
    return results[0]


shown = functools.partial(worded, document, width=120, detail=True)


def test_results_read_again_say_the_same_and_those_of_a_scan_hold_none(results, tmp_path):
    record, out = results
    again = mg.whatif(out).value
    assert [
        form for form in ("table", "json", "md") if shown(again, form) != shown(record, form)
    ] == []
    with pytest.raises(UsageError, match="what_ifs comes too late"):
        mg.whatif(out, what_ifs="topk:3")
    mg.scan(CKPT, out=tmp_path / "scan")
    with pytest.raises(ResultsError, match="holds no what-ifs"):
        mg.whatif(tmp_path / "scan")


def test_what_was_tried_is_counted_and_refusals_and_reasons_stand_below(record):
    text = shown(record)
    assert "4 of 6 what-ifs tried. Least MaxVio: capacity:1" in text
    assert "topk:99, all layers: a token can have 16 experts at most, not 99." in text
    assert "without:16, all layers: there is no expert 16: they are 0 to 15." in text
    assert [one.name for one in record.what_ifs] == list(ASKED)
    assert [one.name for one in record.tried] == list(ASKED[:4])
    entries = json.loads(shown(record, "json"))["what_ifs"]
    assert {one["name"] for one in entries if one["refused"]} == {"topk:99", "without:16"}
    smooth = next(one for one in record.tried if one.name.startswith("smooth"))
    assert smooth.reasons["margins"] == "a smoothed gate has no boundary where its output jumps"
    assert "set_sizes: every token chooses as many experts" in shown(record)
    assert all(all(one.reasons.values()) for one in record.tried)


def test_figures_of_what_was_tried_are_those_of_the_what_if_and_a_table(record):
    means = {one.name: one.experts_mean for one in (record.stored, *record.tried)}
    assert means == pytest.approx(
        {
            "as stored": 4,
            "topk:2": 2,
            "smooth:extra=0.5": 4.5,
            "without:5": 4,
            "capacity:1": 2.42625,
        },
        abs=1e-3,
    )
    rows = {line.split()[0]: line.split() for line in shown(record).splitlines() if "x  " in line}
    assert rows["topk:2"][1:3] == ["2", "0.5x"]
    assert "4.5" in rows["smooth:extra=0.5"]
    table = {
        (row["router"], row["variant"], row["quantity"]): row["value"]
        for row in record.results.rows("whatif")
    }
    expected = {
        (router, one.name, name): value
        for one in record.what_ifs
        for router, figures in one.figures.items()
        for name, value in figures.items()
    }
    assert table == expected
    assert ("text/2", "smooth:extra=0.5", "eps") in table


def report_of(points: list[tuple[float, float]], missing: int, now: float) -> WhatIfReport:
    """What-ifs at two routers with these weights moved and MaxVios; the last ones at one only."""

    def choice(name: str, moved: float, vio: float, layers: int) -> Tried:
        row = {"weight_moved_mean": moved, "max_vio_global": vio}
        routers = [f"text/{n}" for n in range(layers)]
        return Tried(name, dict.fromkeys(routers, row), dict.fromkeys(routers, 4), {}, {}, {}, ())

    tried = [
        choice(str(n), moved, vio, 2 if n < len(points) - missing else 1)
        for n, (moved, vio) in enumerate(points)
    ]
    stored = choice("as stored", 0.0, now, 2)
    return WhatIfReport(cast("Any", None), stored, tuple(tried), cast("Any", None))


#: Few values, so that many are equal.
FEW = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(FEW, FEW), max_size=8), st.integers(0, 2), FEW)
def test_the_front_is_what_no_other_choice_beats(points, missing, now):
    report = report_of(points, missing, now)
    whole = [("as stored", 0.0, now)]
    whole += [(str(n), *p) for n, p in enumerate(points[: max(len(points) - missing, 0)])]

    def beaten(one: tuple[str, float, float]) -> bool:
        return any(m <= one[1] and v <= one[2] and (m < one[1] or v < one[2]) for _, m, v in whole)

    pareto = {one[1:] for one in whole if not beaten(one)}
    front = [(one.mean("weight_moved_mean"), one.mean("max_vio_global")) for one in report.front]
    assert set(front) == pareto
    assert len(front) == len(pareto), "of equal choices the first alone"
    assert front == sorted(front)


def test_a_sweep_too_long_for_bars_has_the_front_alone():
    few, many = (report_of([(n / 60, 1.0 / n) for n in range(1, m)], 0, 2.0) for m in (9, 60))
    assert [chart.name for chart in what_if_figures(few)] == ["choices", "front"]
    assert [chart.name for chart in what_if_figures(many)] == ["front"]
    lost = dataclasses.replace(few, stored=dataclasses.replace(few.stored, rows={}))
    assert [*what_if_figures(lost)] == []


def test_a_router_of_hidden_size_1_is_scanned_and_tried(tmp_path):
    model = SyntheticModel(hidden=1, experts=4, top_k=2, layers=1)
    checkpoint = write_checkpoint(tmp_path / "model", model)
    recording = write_tokens(tmp_path / "rec", model, 2048, num_sinks=0)
    report = mg.whatif(checkpoint, recording, what_ifs=("topk:1", "capacity:1", "relu"))
    assert len(report.value.tried) == 3
    with pytest.raises(mg.MoeGeomError, match="expected dimensions from 1 to 1"):
        mg.cells(checkpoint, recording, subspace="pca:2")
