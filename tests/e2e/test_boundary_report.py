"""``boundary-report`` as people type it: the screen, its refusals, the results it leaves."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.results.reader import open_results
from moegeom.tokens.open import open_tokens
from tests.e2e.conftest import widest
from tests.short_samples import NUM_TOKENS, SAMPLES, short_samples

SAMPLE = Path("sample_ckpts/olmoe-balanced")
CKPT, REC = str(SAMPLE / "step_1500"), str(SAMPLE / "rec/step_1500")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the samples, for results that several tests look at."""
    folder = tmp_path_factory.mktemp("boundary")
    (folder / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def report(moegeom, folder) -> Path:
    """Results of two arithmetics and noise on all tokens of the sample: few of them flip."""
    rec = str(SAMPLES.parent / REC)
    ran = moegeom(
        *(folder, "boundary-report", CKPT, "--tokens", rec, "--out", "report", "--quiet"),
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
    assert "as exact ties break" in text
    tie = r"Half of a sample \(64 tokens of a router\) are within (\S+) of a tie of three experts"
    nearest = r"Half of the tokens are within (\S+) of another choice"
    three, two = (float(re.search(what, text)[1]) for what in (tie, nearest))
    assert 0.0 < two < three < 10.0
    assert "Noise of 2 % of the input's rms flips" in text
    assert "A flipped expert is not a wrong answer" in text
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
    np.save(tmp_path / "x.npy", np.ones((64, 16), np.float32))
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
REFUSED = [
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
    for typed, code, words in REFUSED:
        refused(place, ("boundary-report", *typed.split()), words, code=code)


def test_two_sides_are_compared_token_by_token(moegeom, folder):
    sides = [str(SAMPLE / f"rec/step_{step}") for step in (1500, 1000)]
    moegeom(
        *(folder, "boundary-report", CKPT, "--tokens", sides[0], "--run-b", sides[1]),
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
    assert f"next: moegeom explain {CKPT} --tokens {sides[0]} --run-b {sides[1]}" in screen
    text = " ".join(screen.split())
    assert "not explained by near-ties" in text
    assert "aligned 1,024 of 1,024 tokens" in text
    assert "alignment proven by the choices" in text


def test_a_second_checkpoint_is_told_with_what_is_left_out(moegeom, folder):
    ran = moegeom(
        *(folder, "boundary-report", CKPT, "--arith", "bf16", "--out", "second", "--quiet"),
        *("--tokens", REC, "--checkpoint-b", str(SAMPLE / "step_1000")),
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
    run_b, checkpoint_b = ("--run-b", REC), ("--checkpoint-b", CKPT)
    for sides, words in {
        checkpoint_b: [
            "C chooses the same experts as A for every token, because its routers are",
            "All routers are those of A, bit for bit.",
        ],
        (*run_b, *checkpoint_b): [
            "A and B choose the same experts for every token. C chooses the same",
            f"next: moegeom explain {CKPT} --tokens {REC} --run-b {REC} --checkpoint-b {CKPT}",
        ],
    }.items():
        typed = (CKPT, "--tokens", REC, *sides, "--layers", "0")
        text = moegeom(folder, "boundary-report", *typed).words
        assert [sentence for sentence in words if sentence not in text] == [], text
