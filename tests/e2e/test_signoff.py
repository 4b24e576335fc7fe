"""`moegeom signoff` as it is typed: four lines, exit codes, exports and recordings of a sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from tests.museum.exhibit_smoothing import smoothed
from tests.museum.healthy import trained
from tests.short_samples import NUM_TOKENS, short_samples

A = "sample_ckpts/olmoe-balanced/step_1500"
REC_A = "sample_ckpts/olmoe-balanced/rec/step_1500"
BOTH = ("--tokens", REC_A, "--tokens", "rec_b")


def words(text: str) -> str:
    return " ".join(text.split())


def write_routed(folder: Path, name: str, checkpoint: str, noise: float) -> None:
    """What ``checkpoint`` chooses for the recorded inputs of A behind its own gain, disturbed."""
    source = open_tokens(str(folder / REC_A), None, None, ())
    columns = source.read_columns(0, source.facts.num_tokens)
    first = {r.name: r for r in load_routers(open_checkpoint(folder / A)).routers}
    routers = load_routers(open_checkpoint(folder / checkpoint))
    chosen = {}
    for router in routers.routers:
        values = source.read_values(router.name, 0, source.facts.num_tokens).astype(float)
        random = np.random.default_rng([3, router.layer])
        values = (
            values / first[router.name].gain * (1.0 + noise * random.standard_normal(values.shape))
        )
        order = np.argsort(
            -(values * np.asarray(router.gain)) @ router.weight.T, axis=1, kind="stable"
        )
        chosen[router.name] = order[:, : router.rule.top_k].astype(np.int32)
    with RecordingWriter(
        *(folder / name, "ids", tuple(chosen)),
        checkpoint_name=checkpoint,
        fingerprint=routers.fingerprint,
        engine="test",
        domains=source.facts.domains,
    ) as writer:
        writer.append(columns, None, chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The samples, exports ``folded`` and ``forgotten`` of one of them, recordings of both runs."""
    folder = tmp_path_factory.mktemp("signoff")
    (folder / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    model = trained("olmoe-balanced/step_1500")
    smoothed(model, 1.5, True).write(folder / "folded")
    smoothed(model, 1.5, False).write(folder / "forgotten")
    write_routed(folder, "rec_b", "folded", 0.01)
    write_routed(folder, "rec_a2", A, 0.001)
    return folder


def test_weights_alone_end_inconclusive_with_the_commands_that_go_on(moegeom, folder):
    ran = moegeom(folder, "signoff", A, "folded")
    assert (ran.code, ran.err) == (4, "")
    assert "passed effective router: layers 0-2 gain folded." in words(ran.out)
    assert f"   fill in moegeom capture {A} --text FILE --keep ids --out REC_A\n" in ran.out
    assert "nothing failed; 3 things not checked. exit 4" in words(ran.out)


def test_a_scale_that_the_router_forgot_fails(moegeom, folder):
    ran = moegeom(folder, "signoff", A, "forgotten")
    assert (ran.code, ran.err) == (1, "")
    assert "failed effective router: layers 0-2 weight the same, gain changed" in words(ran.out)


@pytest.mark.parametrize("columns", [80, 120])
def test_two_recordings_of_the_sample_are_signed_off(moegeom, folder, columns):
    limit = ("--max-flipped", "0.05")
    ran = moegeom(
        folder, "signoff", A, "folded", *BOTH, "--rerun", "rec_a2", *limit, COLUMNS=str(columns)
    )
    assert (ran.code, ran.err) == (0, "")
    said = words(ran.out)
    assert "VERDICT PASSED, signed off: all 4 lines passed; 4 things not checked." in said
    assert "of 1,024 tokens differ at one layer or more" in said
    assert "Within the limit of 5 % (--max-flipped)." in said
    assert "times as often" in said
    assert all(len(line) <= columns for line in ran.out.splitlines())


def test_a_limit_below_the_measured_share_fails(moegeom, folder):
    ran = moegeom(folder, "signoff", A, "folded", *BOTH, "--format", "json")
    text = json.loads(ran.out)["lines"][3]
    share = text["evidence"]["between"]["share"]
    assert 0.0 < share < 0.05
    for limit, code in ((0.9 * share, 1), (1.1 * share, 0)):
        ran = moegeom(folder, "signoff", A, "folded", *BOTH, "--max-flipped", str(limit))
        assert (ran.code, ran.err) == (code, "")


def test_a_copy_is_not_taken_for_a_second_run_in_silence(moegeom, folder):
    shutil.copytree(folder / REC_A, folder / "copy")
    recorded = ("--tokens", REC_A, "--tokens", "copy", "--rerun", "rec_a2")
    ran = moegeom(folder, "signoff", A, A, *recorded)
    said = words(ran.out)
    assert "5 things not checked" in said
    assert "whether the recordings of A and of B are of two runs (their files are equal" in said
    assert "of A and --rerun" not in said


def test_a_run_that_repeats_itself_is_not_asked_for_again(moegeom, folder):
    for copy in ("b", "again"):
        shutil.copytree(folder / REC_A, folder / f"copy_{copy}")
    recorded = ("--tokens", REC_A, "--tokens", "copy_b")
    ran = moegeom(folder, "signoff", A, A, *recorded, "--rerun", "copy_again")
    said = words(ran.out)
    assert ran.code == 4
    assert "not signed off: give --max-flipped; routing on text not judged" in said
    assert "A run again (--rerun) repeats itself, so that no limit follows" in said
    without = words(moegeom(folder, "signoff", A, A, *recorded).out)
    assert "not signed off: give --max-flipped (or --rerun); routing on text" in without
    assert "no limit was given (--max-flipped, or --rerun)." in without


def test_recordings_of_other_texts_are_refused_with_counts(moegeom, folder):
    source = open_tokens(str(folder / "rec_b"), None, None, ())
    columns = source.read_columns(0, NUM_TOKENS)
    other = TokenColumns(
        columns.document, columns.position, columns.token_id[::-1].copy(), columns.domain
    )
    with RecordingWriter(
        *(folder / "rec_other", "ids", source.facts.routers),
        checkpoint_name="folded",
        fingerprint=source.facts.fingerprint,
        engine="test",
        domains=source.facts.domains,
    ) as writer:
        writer.append(
            other,
            None,
            {r: np.asarray(source.read_chosen(r, 0, NUM_TOKENS)) for r in source.facts.routers},
        )
    ran = moegeom(folder, "signoff", A, "folded", "--tokens", REC_A, "--tokens", "rec_other")
    assert (ran.code, ran.out) == (3, "")
    assert "of 1,024 matched rows are of another token" in ran.err


def test_markdown_holds_the_commands(moegeom, folder):
    ran = moegeom(folder, "signoff", A, "forgotten", "--format", "md")
    assert ran.code == 1
    assert ran.out.startswith("## moegeom signoff: ")
    assert "- **failed** effective router: layers 0-2 weight the same, gain changed" in ran.out
    assert "`moegeom capture forgotten --text FILE --keep ids --out REC_B`\n" in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((A,), 2, "Missing argument"),
        ((A, "nowhere"), 3, "no such file"),
        ((A, A, "--tokens", REC_A), 2, "given 1 times"),
        ((A, A, "--tokens", REC_A, "--tokens", REC_A), 2, "named twice"),
        ((A, "folded", "--tokens", "rec_b", "--tokens", REC_A), 3, "another checkpoint"),
        ((A, "folded", "--max-flipped", "0.1"), 2, "no --tokens"),
        ((A, "folded", *BOTH, "--max-flipped", "2"), 2, "from 0 to less than 1"),
        ((A, "folded", "--layers", "9"), 2, "no layer with a router"),
    ],
)
def test_what_cannot_be_meant_or_read_is_told(moegeom, folder, arguments, code, said):
    ran = moegeom(folder, "signoff", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err


def test_log_probs_say_what_goes_with_a_flip(moegeom, folder):
    source = open_tokens(str(folder / "rec_b"), None, None, ())
    columns = source.read_columns(0, source.facts.num_tokens)
    change = 0.25 + 0.5 * (columns.document % 2)
    rows = zip(columns.document.tolist(), columns.position.tolist(), change, strict=True)
    lines = [f"{document},{position},-1.0,{-1.0 - by}" for document, position, by in rows]
    head = "document,position,logprob,other_logprob"
    (folder / "scored.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    asked = (folder, "signoff", A, "folded", *BOTH, "--max-flipped", "0.05")
    without, found = moegeom(*asked), moegeom(*asked, "--logprobs", "scored.csv")
    assert (found.code, found.err) == (0, "")
    assert "a flip goes with" in words(found.out)
    assert "3 things not checked" in words(found.out)
    assert "4 things not checked" in words(without.out)
    told = json.loads(moegeom(*asked, "--logprobs", "scored.csv", "--format", "json").out)
    scored = told["lines"][3]["evidence"]["between"]["log_probs"]
    assert 0.25 < scored["mean"] < 0.75
    assert abs(scored["cost"]["nats"]) < 4.0 * scored["cost"]["error"]
    refused = moegeom(folder, "signoff", A, "folded", "--logprobs", "scored.csv")
    assert refused.code == 2
    assert "--logprobs is about recordings" in refused.err
