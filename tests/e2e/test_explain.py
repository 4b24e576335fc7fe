"""``explain`` as people type it: the screen, formats, exit codes and refusals."""

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
from tests.e2e.conftest import widest
from tests.short_samples import SAMPLES, short_samples

CKPT = str(SAMPLES / "olmoe-balanced/step_1500")
OTHER = SAMPLES / "deepseek-tiny"
REC = "sample_ckpts/olmoe-balanced/rec/step_1500"


def recorded():
    return open_tokens(short_samples() / REC.partition("/")[2])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what runs of the sample chose: ``int4``, ``noisy``, ``rounded``; its ``logits``."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    routers = load_routers(open_checkpoint(CKPT)).routers
    source = recorded()
    count = source.facts.num_tokens
    inputs = {router.name: source.read_values(router.name, 0, count) for router in routers}
    generator = np.random.default_rng(3)

    def chosen(x: np.ndarray, weight: np.ndarray, router) -> np.ndarray:
        return route(x @ weight.T, router.rule).chosen.astype(np.int32)

    names = ("int4", "noisy", "plain", "rounded", "logits")
    sides: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for router in routers:
        x = inputs[router.name]
        size = np.sqrt((x**2).mean(axis=1, keepdims=True))
        noisy = x + 0.006 * size * generator.standard_normal(x.shape, dtype=np.float32)
        coarse = stored_as(router.weight, "int4_groups_of_128")
        sides["int4"][router.name] = chosen(x, coarse, router)
        sides["noisy"][router.name] = chosen(noisy, router.weight, router)
        sides["plain"][router.name] = chosen(x, router.weight, router)
        sides["logits"][router.name] = logits = x @ router.weight.T
        rounded = logits.astype(ml_dtypes.bfloat16).astype(np.float32)
        sides["rounded"][router.name] = route(rounded, router.rule).chosen.astype(np.int32)
    columns = source.read_columns(0, count)
    names = tuple(router.name for router in routers)
    for name, values in sides.items():
        stage = "logits" if name == "logits" else "ids"
        with RecordingWriter(
            folder / name, stage, names, dtype="float32", domains=source.facts.domains
        ) as writer:
            writer.append(columns, values, sides["plain"] if stage == "logits" else None)
    return folder


@pytest.fixture(scope="module")
def explain(moegeom, place):
    """Explains a recording B of the folder; A is what was recorded, unless another is named."""

    def ask(b: str, *more: str, tokens: str = REC, **options):
        typed = ("explain", CKPT, "--tokens", tokens, "--run-b", b, "--quiet", *more)
        return moegeom(place, *typed, **options)

    return ask


def test_the_screen_names_the_cause(explain):
    ran = explain("int4", forms=["json", "table", "md"], code=0)
    assert ran.err == ""
    text = " ".join(ran.document["table"]["80"].split())
    assert "VERDICT weights rounded: B's router weights are rounded." in text
    assert re.search(r"-> ([\d,]+ )?router weights int4 by row, scale amax/7.5[; ]", text)
    assert "explains 3 of 3 layers" in text


def test_every_hypothesis_fits_a_narrow_screen_and_keeps_its_words(explain):
    narrow, wide = (
        explain("int4", "--layers", "1", "--detail", COLUMNS=columns, code=0).out
        for columns in ("80", "120")
    )
    assert widest(narrow) <= 80
    words = [sorted(re.sub(r"[\d.]+ m?s\b", "", out).split()) for out in (narrow, wide)]
    assert words[0] == words[1]


def test_every_format_says_the_same(explain):
    forms = explain("noisy", forms=["json", "md"], code=0).document
    found, page = json.loads(forms["json"]["80"]), forms["md"]["80"]
    assert found["verdict"]["cause"] == "arithmetic noise only"
    assert [layer["router"] for layer in found["layers"]] == ["text/0", "text/1", "text/2"]
    assert all(layer["noise"]["num_beyond"] == 0 for layer in found["layers"])
    sizes = [layer["noise"]["scale"] for layer in found["layers"]]
    assert all(0.003 < size < 0.012 for size in sizes)
    assert "**VERDICT** arithmetic noise only" in page
    assert page.count("\n| ") > len(found["layers"]) + len(found["faults"])


def test_what_a_holds_decides_which_causes_can_be_told(explain):
    ids = explain("int4", tokens="plain", code=4).out
    assert "VERDICT  inconclusive" in ids
    assert "A holds ids" in ids
    forms = explain("rounded", tokens="logits", forms=["json", "table"]).document
    causes = {fault["cause"] for fault in json.loads(forms["json"]["80"])["faults"]}
    assert "logits rounded" in causes
    assert not {"weights rounded", "inputs rounded", "rows damaged"} & causes
    assert "Not checked: rows and inputs (A holds logits only)" in forms["table"]["140"]


def test_choices_in_an_array_of_ones_own_are_compared_as_recorded_ones_are(explain, refused, place):
    source, other = recorded(), open_tokens(place / "int4")
    count, columns = source.facts.num_tokens, source.read_columns(0, source.facts.num_tokens)
    chosen = {
        name.replace("/", "."): other.read_chosen(name, 0, count) for name in source.facts.routers
    }
    # as a harness of one's own writes them
    np.savez(place / "b.npz", document=columns.document, position=columns.position, **chosen)
    typed = ("explain", CKPT, "--tokens", REC, "--run-b", "b.npz")
    refused(place, typed, "Add --stage-b, one of", code=2)
    of_arrays, of_a_recording = (
        explain(b, *stage, "--layers", "1", "--format", "json", code=0).document["verdict"]
        for b, stage in (("b.npz", ("--stage-b", "ids")), ("int4", ()))
    )
    assert of_arrays == of_a_recording


def test_rows_of_other_tokens_are_told_without_recorded_choices(explain, place):
    source, other = recorded(), open_tokens(place / "plain")
    count, names = source.facts.num_tokens, source.facts.routers
    columns = source.read_columns(0, count)
    inputs = {name: source.read_values(name, 0, count) for name in names}
    late = {name: np.roll(other.read_chosen(name, 0, count), 1, axis=0) for name in names}
    for path, stage, values in (("inputs", "router_input", inputs), ("late", "ids", late)):
        with RecordingWriter(
            place / path, stage, names, dtype="float32", domains=source.facts.domains
        ) as writer:
            writer.append(columns, values)
    text = explain("late", tokens="inputs", code=0).words
    assert "VERDICT tokens shifted" in text
    assert re.search(r"rows of the token 1 before; all layers: 9[89]\.\d % equal", text)


SCORES = "document,position,logprob,other_logprob\n"

#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    (("--run-b", "int4", "--logprobs", "int4"), 3, ".parquet"),
    (("--run-b", "int4", "--logprobs", "lost.csv"), 3, "cannot be read"),
    (("--run-b", "nowhere"), 3, "no such file"),
    (("--run-b", str(OTHER / "rec/step_1500")), 3, "names experts"),
    (("--run-b", "int4", "--checkpoint-b", "nowhere"), 3, "nowhere"),
    (("--run-b", "int4", "--layers", "9"), 2, "no layer"),
    (("--run-b", "int4", "--checkpoint-b", str(OTHER / "step_1500")), 3, "no router text/0"),
]

#: Files of log-probs that are none, and words of the refusal.
NO_SCORES = {
    "document,position,logprob\n0,1,-1\n": "expected document",
    SCORES: "no rows",
    f"{SCORES}0,1,-1,nan\n": "without gaps",
    f"{SCORES}0,1,-1,-inf\n": "row 0",
    f"{SCORES}0,1.5,-1,-1\n": "integers",
    f"{SCORES}0,1,x,-1\n": "numbers",
    f"{SCORES}0,1,,-1\n": "gaps",
    f"{SCORES}999999,1,-1,-1\n": "none of its 1 row is",
}


def test_what_cannot_be_explained_is_one_sentence(refused, place):
    typed = ("explain", CKPT, "--tokens", REC)
    for more, code, words in REFUSED:
        refused(place, (*typed, *more), words, code=code)
    for text, words in NO_SCORES.items():
        (place / "none.csv").write_text(text, encoding="utf-8")
        refused(place, (*typed, "--run-b", "plain", "--logprobs", "none.csv"), words)


def _with_inputs(folder: Path, name: str, change) -> str:
    """What B reads, changed, and what its routers choose then; the name of the recording."""
    source = recorded()
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
    return name


def test_inputs_of_both_sides_tell_rounding_from_what_befell_some_tokens(explain, place):
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
        said[name] = explain(_with_inputs(place, name, change), "--layers", "1", code=0).words
    assert "VERDICT inputs rounded" in said["bf16"]
    assert "they hold numbers of bfloat16 alone, A's do not" in said["bf16"]
    assert "VERDICT not the router" in said["some"]
    assert "times as much as those of the median one, in 1 of 16 documents (5)" in said["some"]
    assert "VERDICT arithmetic noise only" in said["even"]
