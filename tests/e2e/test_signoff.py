"""`moegeom signoff` as it is typed: four lines, exit codes, exports and recordings of a sample."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from tests.museum.exhibit_smoothing import smoothed
from tests.museum.healthy import trained
from tests.short_samples import short_samples

A = "sample_ckpts/olmoe-balanced/step_1500"
REC_A = "sample_ckpts/olmoe-balanced/rec/step_1500"
BOTH = ("--tokens", REC_A, "--tokens", "rec_b")


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
    ran = moegeom(folder, "signoff", A, "folded", code=4)
    assert ran.err == ""
    assert "passed effective router: layers 0-2 gain folded." in ran.words
    assert f"   fill in moegeom capture {A} --text FILE --keep ids --out REC_A\n" in ran.out
    assert "nothing failed; 3 things not checked. exit 4" in ran.words


def test_a_scale_that_the_router_forgot_fails(moegeom, folder):
    forms = moegeom(folder, "signoff", A, "forgotten", forms=["table", "md"], code=1).document
    failed = "effective router: layers 0-2 weight the same, gain changed"
    assert f"failed {failed}" in " ".join(forms["table"]["80"].split())
    page = forms["md"]["80"]
    assert page.startswith("## moegeom signoff: ")
    assert f"- **failed** {failed}" in page
    assert "`moegeom capture forgotten --text FILE --keep ids --out REC_B`\n" in page


def test_two_recordings_of_the_sample_are_signed_off(moegeom, folder):
    limit = ("--rerun", "rec_a2", "--max-flipped", "0.05")
    ran = moegeom(folder, "signoff", A, "folded", *BOTH, *limit, forms=["table"], code=0)
    assert ran.err == ""
    said = " ".join(ran.document["table"]["80"].split())
    assert "VERDICT PASSED, signed off: all 4 lines passed; 4 things not checked." in said
    assert "of 1,024 tokens differ at one layer or more" in said
    assert "Within the limit of 5 % (--max-flipped)." in said
    assert "times as often" in said


def test_a_copy_is_not_taken_for_a_second_run_in_silence(moegeom, folder):
    for copy in ("copy", "again"):
        shutil.copytree(folder / REC_A, folder / copy)
    asked = (folder, "signoff", A, A, "--tokens", REC_A, "--tokens", "copy")
    said = moegeom(*asked, "--rerun", "rec_a2").words
    assert "5 things not checked" in said
    assert "whether the recordings of A and of B are of two runs (their files are equal" in said
    assert "of A and --rerun" not in said
    # a run that repeats itself gives no limit, and is not asked for again
    said = moegeom(*asked, "--rerun", "again", code=4).words
    assert "not signed off: give --max-flipped; routing on text not judged" in said
    assert "A run again (--rerun) repeats itself, so that no limit follows" in said
    without = moegeom(*asked).words
    assert "not signed off: give --max-flipped (or --rerun); routing on text" in without
    assert "no limit was given (--max-flipped, or --rerun)." in without


#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    ((A, "nowhere"), 3, "no such file"),
    ((A, "folded", "--tokens", "rec_b", "--tokens", REC_A), 3, "another checkpoint"),
    ((A, "folded", "--logprobs", "scored.csv"), 2, "--logprobs is about recordings"),
]


def test_what_cannot_be_meant_or_read_is_told(refused, folder):
    for arguments, code, words in REFUSED:
        refused(folder, ("signoff", *arguments), words, code=code)


def test_log_probs_say_what_goes_with_a_flip(moegeom, folder):
    source = open_tokens(str(folder / "rec_b"), None, None, ())
    columns = source.read_columns(0, source.facts.num_tokens)
    change = 0.25 + 0.5 * (columns.document % 2)
    rows = zip(columns.document.tolist(), columns.position.tolist(), change, strict=True)
    lines = [f"{document},{position},-1.0,{-1.0 - by}" for document, position, by in rows]
    head = "document,position,logprob,other_logprob"
    (folder / "scored.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    asked = (folder, "signoff", A, "folded", *BOTH, "--max-flipped", "0.05")
    assert "4 things not checked" in moegeom(*asked).words
    scoring = (*asked, "--logprobs", "scored.csv")
    ran = moegeom(*scoring, code=0)
    assert ran.err == ""
    assert "a flip goes with" in ran.words
    assert "3 things not checked" in ran.words
    scored = moegeom(*scoring, "--format", "json").document["lines"][3]["evidence"]["between"][
        "log_probs"
    ]
    assert 0.25 < scored["mean"] < 0.75
    assert abs(scored["cost"]["nats"]) < 4.0 * scored["cost"]["error"]
