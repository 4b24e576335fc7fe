"""``explain`` as people type it: the screen, formats, exit codes and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry.number_formats import stored_as
from moegeom.geometry.selection import route
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from tests.short_samples import SAMPLES

CKPT = str(SAMPLES / "olmoe-balanced/step_1500")
OTHER = SAMPLES / "deepseek-tiny"
REC = str(SAMPLES / "olmoe-balanced/rec/step_1500")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what runs of the sample chose: ``int4``, ``noisy``; its ``logits``, ``ids``."""
    folder = tmp_path_factory.mktemp("explain")
    routers = load_routers(open_checkpoint(CKPT)).routers
    source = open_tokens(REC)
    count = source.facts.num_tokens
    inputs = {router.name: source.read_values(router.name, 0, count) for router in routers}
    generator = np.random.default_rng(3)

    def chosen(x: np.ndarray, weight: np.ndarray, router) -> np.ndarray:
        return route(x @ weight.T, router.rule).chosen.astype(np.int32)

    sides: dict[str, dict[str, np.ndarray]] = {"int4": {}, "noisy": {}, "plain": {}, "logits": {}}
    for router in routers:
        x = inputs[router.name]
        size = np.sqrt((x**2).mean(axis=1, keepdims=True))
        noisy = x + 0.002 * size * generator.standard_normal(x.shape, dtype=np.float32)
        coarse = stored_as(router.weight, "int4_groups_of_128")
        sides["int4"][router.name] = chosen(x, coarse, router)
        sides["noisy"][router.name] = chosen(noisy, router.weight, router)
        sides["plain"][router.name] = chosen(x, router.weight, router)
        sides["logits"][router.name] = x @ router.weight.T
    columns = source.read_columns(0, count)
    names = tuple(router.name for router in routers)
    for name, values in sides.items():
        stage = "logits" if name == "logits" else "ids"
        with RecordingWriter(
            folder / name, stage, names, dtype="float32", domains=source.facts.domains
        ) as writer:
            writer.append(columns, values, sides["plain"] if stage == "logits" else None)
    rows = zip(columns.document.tolist(), columns.position.tolist(), strict=True)
    lines = [f"{document},{position},-1.0,-1.5" for document, position in rows]
    head = "document,position,logprob,other_logprob"
    (folder / "scored.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    return folder


def test_the_screen_fits_and_names_the_cause(moegeom, place):
    asked = (place, "explain", CKPT, "--tokens", REC, "--run-b", "int4", "--quiet")
    ran = moegeom(*asked, forms=["json", "table", "md"])
    assert (ran.code, ran.err) == (0, "")
    screens = json.loads(ran.out)["table"]
    for columns, screen in screens.items():
        assert max(map(len, screen.splitlines())) <= int(columns)
    text = " ".join(screens["80"].split())
    assert "VERDICT weights rounded: B's router weights are rounded." in text
    assert re.search(r"-> (10,055 )?router weights int4 by row, scale amax/7.5[; ]", text)
    assert "explains 3 of 3 layers" in text


def test_every_hypothesis_fits_a_narrow_screen_and_keeps_its_words(moegeom, place):
    asked = (
        place,
        "explain",
        CKPT,
        "--tokens",
        REC,
        "--run-b",
        "int4",
        "--quiet",
        "--detail",
    )
    narrow, wide = (moegeom(*asked, COLUMNS=columns) for columns in ("80", "120"))
    assert (narrow.code, narrow.err) == (0, "")
    assert max(map(len, narrow.out.splitlines())) <= 80
    words = [sorted(re.sub(r"[\d.]+ m?s\b", "", ran.out).split()) for ran in (narrow, wide)]
    assert words[0] == words[1]


def test_every_format_says_the_same(moegeom, place):
    asked = (place, "explain", CKPT, "--tokens", REC, "--run-b", "noisy", "--quiet")
    found = json.loads(moegeom(*asked, "--format", "json").out)
    assert found["verdict"]["cause"] == "arithmetic noise only"
    assert [layer["router"] for layer in found["layers"]] == ["text/0", "text/1", "text/2"]
    assert all(layer["noise"]["num_beyond"] == 0 for layer in found["layers"])
    sizes = [layer["noise"]["scale"] for layer in found["layers"]]
    assert all(0.001 < size < 0.004 for size in sizes)
    page = moegeom(*asked, "--format", "md").out
    assert "**VERDICT** arithmetic noise only" in page
    assert page.count("\n| ") > len(found["layers"]) + len(found["faults"])


def test_a_run_agrees_with_itself(moegeom, place):
    ran = moegeom(place, "explain", CKPT, "--tokens", REC, "--run-b", "plain", "--quiet")
    assert "VERDICT  no disagreement" in ran.out
    assert "causes" not in ran.out


def test_log_probs_that_differ_everywhere_clear_the_router(moegeom, place):
    ran = moegeom(
        *(place, "explain", CKPT, "--tokens", REC, "--run-b", "noisy", "--quiet"),
        *("--logprobs", "scored.csv"),
    )
    text = " ".join(ran.out.split())
    assert "VERDICT not the router" in text
    assert "log-probs differ by 0.5 nats in the mean, by 0.5 where no expert flipped" in text


def test_ids_on_both_sides_are_compared_and_leave_it_open(moegeom, place):
    ran = moegeom(place, "explain", CKPT, "--tokens", "plain", "--run-b", "int4", "--quiet")
    assert ran.code == 4
    assert "VERDICT  inconclusive" in ran.out
    assert "A holds ids" in ran.out


def test_logits_are_enough_for_what_needs_no_inputs(moegeom, place):
    asked = (place, "explain", CKPT, "--tokens", "logits", "--run-b", "noisy", "--quiet")
    ran = moegeom(*asked, "--format", "json")
    causes = {fault["cause"] for fault in json.loads(ran.out)["faults"]}
    assert "logits rounded" in causes
    assert not {"weights rounded", "inputs rounded", "rows damaged"} & causes
    assert ran.code == 4
    assert "Not checked: rows and inputs (A holds logits only)" in moegeom(*asked).out


def test_choices_in_an_array_of_ones_own_are_compared_as_recorded_ones_are(
    moegeom, place, tmp_path
):
    source, other = open_tokens(REC), open_tokens(place / "int4")
    count, columns = source.facts.num_tokens, source.read_columns(0, source.facts.num_tokens)
    chosen = {
        name.replace("/", "."): other.read_chosen(name, 0, count) for name in source.facts.routers
    }
    np.savez(
        tmp_path / "b.npz", document=columns.document, position=columns.position, **chosen
    )  # as a harness of one's own writes them
    (tmp_path / "int4").symlink_to(place / "int4")
    asked = (tmp_path, "explain", CKPT, "--tokens", REC, "--quiet")
    refused = moegeom(*asked, "--run-b", "b.npz")
    assert refused.code == 2
    assert "Add --stage-b, one of" in refused.err
    found, recorded = (
        moegeom(*asked, *b, "--format", "json")
        for b in (("--run-b", "b.npz", "--stage-b", "ids"), ("--run-b", "int4"))
    )
    assert found.code == recorded.code == 0, found.err
    assert json.loads(found.out)["verdict"] == json.loads(recorded.out)["verdict"]


def test_rows_of_other_tokens_are_told_without_recorded_choices(moegeom, place, tmp_path):
    source, other = open_tokens(REC), open_tokens(place / "plain")
    count, names = source.facts.num_tokens, source.facts.routers
    columns = source.read_columns(0, count)
    inputs = {name: source.read_values(name, 0, count) for name in names}
    late = {name: np.roll(other.read_chosen(name, 0, count), 1, axis=0) for name in names}
    for path, stage, values in (("inputs", "router_input", inputs), ("late", "ids", late)):
        with RecordingWriter(
            tmp_path / path, stage, names, dtype="float32", domains=source.facts.domains
        ) as writer:
            writer.append(columns, values)
    ran = moegeom(tmp_path, "explain", CKPT, "--tokens", "inputs", "--run-b", "late", "--quiet")
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "VERDICT tokens shifted" in text
    assert re.search(r"rows of the token 1 before; all layers: 9[89]\.\d % equal", text)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--run-b", "int4", "--logprobs", "int4"), 3, ".parquet"),
        (("--run-b", "int4", "--logprobs", "lost.csv"), 3, "cannot be read"),
        (("--run-b", "nowhere"), 3, "no such file"),
        (("--run-b", str(OTHER / "rec/step_1500")), 3, "names experts"),
        (("--run-b", "int4", "--checkpoint-b", "nowhere"), 3, "nowhere"),
        (("--run-b", "int4", "--layers", "9"), 2, "no layer"),
        (("--run-b", "int4", "--checkpoint-b", str(OTHER / "step_1500")), 3, "no router text/0"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_explained_is_one_sentence(moegeom, place, arguments, code, said):
    ran = moegeom(place, "explain", CKPT, "--tokens", REC, *arguments)
    assert ran.code == code, ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert "internal error" not in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("document,position,logprob\n0,1,-1\n", "expected document"),
        ("document,position,logprob,other_logprob\n", "no rows"),
        ("document,position,logprob,other_logprob\n0,1,-1,nan\n", "without gaps"),
        ("document,position,logprob,other_logprob\n0,1,-1,-inf\n", "row 0"),
        ("document,position,logprob,other_logprob\n0,1.5,-1,-1\n", "integers"),
        ("document,position,logprob,other_logprob\n0,1,x,-1\n", "numbers"),
        ("document,position,logprob,other_logprob\n0,1,,-1\n", "gaps"),
        ("document,position,logprob,other_logprob\n999999,1,-1,-1\n", "none of its 1 row is"),
    ],
)
def test_a_file_of_log_probs_is_refused_with_the_reason(moegeom, place, tmp_path, text, said):
    path = tmp_path / "scored.csv"
    path.write_text(text, encoding="utf-8")
    ran = moegeom(
        *(place, "explain", CKPT, "--tokens", REC, "--run-b", "plain"),
        "--logprobs",
        str(path),
    )
    assert ran.code == 3, ran.err
    assert said in ran.err


def _with_inputs(folder: Path, name: str, change) -> str:
    """What B reads, changed, and what its routers choose then; the name of the recording."""
    source = open_tokens(REC)
    count = source.facts.num_tokens
    columns = source.read_columns(0, count)
    inputs, chosen = {}, {}
    for router in load_routers(open_checkpoint(CKPT)).routers:
        x = change(source.read_values(router.name, 0, count), columns.document)
        inputs[router.name] = x
        chosen[router.name] = route(x @ router.weight.T, router.rule).chosen.astype(np.int32)
    with RecordingWriter(
        folder / name, "router_input", tuple(inputs), dtype="float32", domains=source.facts.domains
    ) as writer:
        writer.append(columns, inputs, chosen)
    return str(folder / name)


def test_inputs_of_both_sides_tell_rounding_from_what_befell_some_tokens(moegeom, tmp_path):
    random = np.random.default_rng(8)

    def noisy(x, document):
        size = np.where(document == 5, 0.02, 0.0004)[:, None]
        return x + (size * random.standard_normal(x.shape)).astype(np.float32)

    def even(x, document):
        return x + (0.001 * random.standard_normal(x.shape)).astype(np.float32)

    said = {}
    for name, change in {
        "bf16": lambda x, document: (x * 0.999).astype(ml_dtypes.bfloat16).astype(np.float32),
        "some": noisy,
        "even": even,
    }.items():
        b = _with_inputs(tmp_path, name, change)
        ran = moegeom(tmp_path, "explain", CKPT, "--tokens", REC, "--run-b", b, "--quiet")
        assert ran.code == 0, ran.err
        said[name] = " ".join(ran.out.split())
    assert "VERDICT inputs rounded" in said["bf16"]
    assert "they hold numbers of bfloat16 alone, A's do not" in said["bf16"]
    assert "VERDICT not the router" in said["some"]
    assert "times as much as those of the median one, in 1 of 64 documents (5)" in said["some"]
    assert "VERDICT arithmetic noise only" in said["even"]
