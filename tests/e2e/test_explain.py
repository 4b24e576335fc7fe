"""``explain`` and ``boundary-report`` as people type them: screens, formats, exit codes, results."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.geometry.number_formats import stored_as
from moegeom.geometry.selection import route
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.columns import recording_of
from tests.e2e.conftest import widest
from tests.short_samples import NUM_TOKENS, SAMPLES, short_samples

CKPT = str(SAMPLES / "olmoe-balanced/step_1500")
OTHER = SAMPLES / "deepseek-tiny"
REC = "sample_ckpts/olmoe-balanced/rec/step_1500"


def recorded():
    return open_tokens(short_samples() / REC.partition("/")[2])


def written(path: Path, stage: str, *tensors) -> Path:
    return recording_of(path, stage, *tensors, dtype="float32", domains=recorded().facts.domains)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
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
    for name, values in sides.items():
        what = ("logits", sides["plain"]) if name == "logits" else ("ids", None)
        written(folder / name, what[0], columns, values, what[1])
    return folder


@pytest.fixture(scope="module")
def explain(moegeom, served):
    """Explains a recording B of the folder; A is what was recorded, unless another is named."""

    def ask(b: str, *more: str, tokens: str = REC, **options):
        typed = ("explain", CKPT, "--tokens", tokens, "--run-b", b, "--quiet", *more)
        return moegeom(served, *typed, **options)

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


def test_choices_in_an_array_are_compared_as_recorded_ones_are(explain, refused, served):
    source, other = recorded(), open_tokens(served / "int4")
    count, columns = source.facts.num_tokens, source.read_columns(0, source.facts.num_tokens)
    chosen = {
        name.replace("/", "."): other.read_chosen(name, 0, count) for name in source.facts.routers
    }
    # as a harness of one's own writes them
    np.savez(served / "b.npz", document=columns.document, position=columns.position, **chosen)
    typed = ("explain", CKPT, "--tokens", REC, "--run-b", "b.npz")
    refused(served, typed, "Add --stage-b, one of", code=2)
    of_arrays, of_a_recording = (
        explain(b, *stage, "--layers", "1", "--format", "json", code=0).document["verdict"]
        for b, stage in (("b.npz", ("--stage-b", "ids")), ("int4", ()))
    )
    assert of_arrays == of_a_recording


def test_rows_of_other_tokens_are_told_without_recorded_choices(explain, served):
    source, other = recorded(), open_tokens(served / "plain")
    count, names = source.facts.num_tokens, source.facts.routers
    columns = source.read_columns(0, count)
    inputs = {name: source.read_values(name, 0, count) for name in names}
    late = {name: np.roll(other.read_chosen(name, 0, count), 1, axis=0) for name in names}
    for path, stage, values in (("inputs", "router_input", inputs), ("late", "ids", late)):
        written(served / path, stage, columns, values)
    text = explain("late", tokens="inputs", code=0).words
    assert "VERDICT tokens shifted" in text
    assert re.search(r"Rows of the token 1 before: gives 9[89] % of B's choices", text)


SCORES = "document,position,logprob,other_logprob\n"

#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    (("--run-b", "int4", "--logprobs", "int4"), 3, ".parquet"),
    (("--run-b", "int4", "--logprobs", "lost.csv"), 3, "cannot be read"),
    (("--run-b", "nowhere"), 3, "no such file"),
    (("--run-b", str(OTHER / "rec/step_1500")), 3, "ids name none of the"),
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


def test_what_cannot_be_explained_is_one_sentence(refused, served):
    typed = ("explain", CKPT, "--tokens", REC)
    for more, code, words in REFUSED:
        refused(served, (*typed, *more), words, code=code)
    for text, words in NO_SCORES.items():
        (served / "none.csv").write_text(text, encoding="utf-8")
        refused(served, (*typed, "--run-b", "plain", "--logprobs", "none.csv"), words)


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
    return written(folder / name, "router_input", columns, inputs, chosen).name


def test_inputs_of_both_sides_tell_rounding_from_what_befell_some_tokens(explain, served):
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
        said[name] = explain(_with_inputs(served, name, change), "--layers", "1", code=0).words
    assert "VERDICT inputs rounded" in said["bf16"]
    assert "they hold numbers of bfloat16 alone, A's do not" in said["bf16"]
    assert "VERDICT not the router" in said["some"]
    assert "times as much as those of the median one, in 1 of 16 documents (5)" in said["some"]
    assert "VERDICT arithmetic noise only" in said["even"]


SAMPLE = Path("sample_ckpts/olmoe-balanced")
REPORTED_CKPT, REPORTED_REC = str(SAMPLE / "step_1500"), str(SAMPLE / "rec/step_1500")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the samples, for results that several tests look at."""
    folder = tmp_path_factory.mktemp("boundary")
    (folder / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def report(moegeom, folder) -> Path:
    """Results of two arithmetics and noise on all tokens of the sample: few of them flip."""
    rec = str(SAMPLES.parent / REPORTED_REC)
    ran = moegeom(
        *(folder, "boundary-report", REPORTED_CKPT, "--tokens", rec, "--out", "report", "--quiet"),
        *("--arith", "bf16-logits", "--arith", "float32-blocks", "--noise", "0.02"),
        code=0,
    )
    assert ran.err == ""
    return folder / "report"


def forms_of(moegeom, results: Path) -> dict[str, dict[str, str]]:
    """The report of results in each form; no line but a command is longer than its screen."""
    forms = moegeom(
        *(results.parent, "boundary-report", results.name), forms=["json", "table", "md"], code=0
    ).document
    for columns, screen in forms["table"].items():
        assert widest(re.sub(r"(?m)^   next: .*", "", screen)) <= int(columns)
    return forms


def test_the_screen_says_what_flips(moegeom, report):
    forms = forms_of(moegeom, report)
    text = " ".join(forms["table"]["80"].split())
    assert re.search(r"VERDICT bf16-logits flips most: 0\.\d+ % of the choices", text)
    assert re.search(r"bf16-logits 0\.\d+ % 0\.\d+ % 0\.\d+ % L\d", text)
    assert re.search(r"float32-blocks 0 % 0 % - 0 % 0 % (100|99\.\d+) %", text)
    assert "depending on the tie rule" in text
    nearest = re.search(r"Half of the tokens are within (\S+) of another choice", text)
    assert 0.0 < float(nearest[1]) < 10.0
    assert "Noise of 2 % of the input's rms flips" in text
    assert "A flip is not by itself a worse output" in text
    lines = [line for line in forms["md"]["80"].splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines[2:]] == ["bf16-logits", "float32-blocks"]
    assert lines[0].endswith("| predicted |")
    document = json.loads(
        forms["json"]["80"], parse_constant=lambda name: pytest.fail(f"not strict: {name}")
    )
    assert document["rule_status"] == "verified"
    assert [v["variant"] for v in document["variants"]] == ["bf16-logits", "float32-blocks"]
    for variant in document["variants"]:
        assert [row["router"] for row in variant["layers"]] == ["text/0", "text/1", "text/2"]
        assert all(row["num_disproved"] == 0 for row in variant["layers"])
        assert len(variant["random"]) == 3


def test_tokens_that_the_order_of_experts_alone_keeps_are_not_said_to_stay(moegeom, tmp_path):
    rows = {"model.layers.0.mlp.gate.weight": np.zeros((8, 16), np.float32)}
    save_file(rows, tmp_path / "zero.safetensors")
    np.save(tmp_path / "x.npy", np.full((64, 16), 1.001, np.float32))
    ran = moegeom(
        *(tmp_path, "boundary-report", "zero.safetensors", "--tokens", "x.npy"),
        *("--stage", "router_input", "--arith", "bf16", "--top-k", "2", "--score", "softmax"),
        *("--router-pattern", r"model.layers.(\d+).mlp.gate.weight"),
    )
    text = " ".join(ran.out.split())
    assert "unless an exact tie breaks otherwise; if it does, bf16 flips up to 100 %" in text


def test_what_it_leaves_is_a_scan_as_well(moegeom, report):
    moegeom(report.parent, "report", "report", code=0)
    results = open_results(report)
    rows = {
        (row["router"], row["variant"], row["population"]): row for row in results.rows("layers")
    }
    exact, others = (
        [rows[f"text/{layer}", name, "all"] for layer in range(3)]
        for name in ("as_stored", "bf16-logits")
    )
    assert {row["flipped_share"] for row in exact} == {row["load_cv_ddof0"] for row in others}
    assert exact[0]["flipped_share"] is None
    other = max(others, key=lambda row: row["flipped_share"])
    assert 0.0 < other["flipped_share_least"] < other["flipped_share"] < other["flipped_share_most"]
    variants = {row["variant"]: row for row in results.rows("variants")}
    assert all(variants[name]["text"] for name in ("random", "bf16-logits", "random+bf16-logits"))
    some, seen = (
        variants["bf16-logits"][name] for name in ("num_flipped_any_layer", "num_tokens_all_layers")
    )
    shares, predicted = (
        [row[column] for row in others] for column in ("flipped_share", "predicted_flipped_share")
    )
    assert seen == 4096
    assert max(shares) <= some / seen <= sum(shares)
    # the noise model without emulation
    assert np.mean(predicted) / np.mean(shares) == pytest.approx(1.0, abs=0.3)


def test_the_reference_can_be_another_arithmetic(moegeom, place):
    said = "boundary-report model --tokens rec --layers 1 --arith bf16 --format json"
    same = moegeom(place, *said.split(), "--reference", "bf16").document
    assert same["variants"][0]["flipped_share"] == 0.0
    other = moegeom(place, *said.split(), "--reference", "bf16-logits").document
    assert other["variants"][0]["flipped_share"] > 0.0


#: What cannot be meant or read, the exit code, and words of the refusal.
REFUSED_BY_REPORT = [
    ("model", 2, "boundary-report needs tokens"),
    ("model --tokens rec --arith bf15", 2, "bf15"),
    ("model --tokens rec --reference nothing", 2, "nothing"),
    ("model --tokens rec --noise -1", 2, "expected a positive share"),
    ("model --tokens rec --noise elsewhere", 3, "elsewhere"),
    ("results", 3, "holds no variants"),
    ("model --tokens rec --out results", 2, "another request: arithmetics differ"),
    ("model --tokens rec --checkpoint-b elsewhere", 3, "elsewhere"),
    (f"model --tokens rec --checkpoint-b {'x' * 300}", 3, "cannot be read"),
    ("model --tokens rec --checkpoint-b rec", 2, "--run-b compares with what another run chose"),
]


def test_what_cannot_be_meant_is_told(refused, place):
    for typed, code, words in REFUSED_BY_REPORT:
        refused(place, ("boundary-report", *typed.split()), words, code=code)


def test_two_sides_are_compared_token_by_token(moegeom, folder):
    sides = [str(SAMPLE / f"rec/step_{step}") for step in (1500, 1000)]
    moegeom(
        *(folder, "boundary-report", REPORTED_CKPT, "--tokens", sides[0], "--run-b", sides[1]),
        *("--arith", "bf16", "--out", "sides", "--quiet"),
        code=0,
    )
    forms = forms_of(moegeom, folder / "sides")
    document = json.loads(forms["json"]["80"])
    other = document["variants"][0]
    assert other["variant"] == "run-b"
    a, b = (open_tokens(folder / side) for side in sides)
    shares = []
    for row in other["layers"]:
        chosen = [np.sort(side.read_chosen(row["router"], 0, NUM_TOKENS)) for side in (a, b)]
        differs = (chosen[0] != chosen[1]).any(axis=1)
        shares.append(differs.mean())
        assert row["flipped_share"] == shares[-1]
        counts = [np.bincount(side.reshape(-1), minlength=16) for side in chosen]
        shift = (counts[1] - counts[0]) / (NUM_TOKENS * 4 / 16)
        assert row["load_shift_max"] == pytest.approx(shift[np.argmax(np.abs(shift))])
        # sets alone are known of the other run
        assert {"proved_share", "tied_share", "reordered_share"}.isdisjoint(row)
    assert f"A and B choose differently in {100 * np.mean(shares):.3g} %" in document["verdict"]
    screen = forms["table"]["80"]
    assert f"next: moegeom explain {REPORTED_CKPT} --tokens {sides[0]} --run-b {sides[1]}" in screen
    text = " ".join(screen.split())
    assert "not explained by near-ties" in text
    assert "aligned 1,024 of 1,024 tokens" in text
    assert "alignment proven by the choices" in text


def test_a_second_checkpoint_is_told_with_what_is_left_out(moegeom, folder):
    ran = moegeom(
        *(
            folder,
            "boundary-report",
            REPORTED_CKPT,
            "--arith",
            "bf16",
            "--out",
            "second",
            "--quiet",
        ),
        *("--tokens", REPORTED_REC, "--checkpoint-b", str(SAMPLE / "step_1000")),
        code=0,
    )
    assert ran.err == ""
    forms = forms_of(moegeom, folder / "second")
    document = json.loads(forms["json"]["80"])
    assert [variant["variant"] for variant in document["variants"]] == ["checkpoint-b", "bf16"]
    text = " ".join(forms["table"]["80"].split())
    assert "C step_1000: its routers on the inputs of A." in text
    assert "Its own hidden states would differ" in text
    assert "Another gain stands in front of all layers" in text
    assert "The routers of C choose differently from those of A in" in text
    assert "of the flips are among the 10 % of tokens with the least margin" in text
    assert "next:" not in text
    assert "- **C** step\\_1000" in forms["md"]["80"]
    assert re.search(r"^\| checkpoint-b \|.*\| - \| - \|", forms["md"]["80"], re.MULTILINE)


def test_a_side_that_is_the_same_says_why_nothing_flips(moegeom, folder):
    """A checkpoint beside itself, and a run as well."""
    run_b, checkpoint_b = ("--run-b", REPORTED_REC), ("--checkpoint-b", REPORTED_CKPT)
    for sides, words in {
        checkpoint_b: [
            "C chooses the same experts as A for every token, because its routers are",
            "All routers are those of A, bit for bit.",
        ],
        (*run_b, *checkpoint_b): [
            "A and B choose the same experts for every token. C chooses the same",
            f"next: moegeom explain {REPORTED_CKPT} --tokens {REPORTED_REC} --run-b {REPORTED_REC} --checkpoint-b {REPORTED_CKPT}",
        ],
    }.items():
        typed = (REPORTED_CKPT, "--tokens", REPORTED_REC, *sides, "--layers", "0")
        text = moegeom(folder, "boundary-report", *typed).words
        assert [sentence for sentence in words if sentence not in text] == [], text
