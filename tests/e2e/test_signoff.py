"""`moegeom diff`, `signoff` and `track` as they are typed: screens, exit codes, streams, results,
false alarms.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import open_results
from moegeom.router.load import load_routers
from moegeom.studies.diff.study import figure_changes
from moegeom.tokens.open import open_tokens
from tests.columns import recording_of
from tests.e2e.conftest import GATES, widest
from tests.museum.exhibit_quantisers import smoothed
from tests.museum.healthy import trained
from tests.short_samples import SAMPLES, short_samples

SERIES = "sample_ckpts/olmoe-balanced"
OLD, NEW = f"{SERIES}/step_1000", f"{SERIES}/step_1500"
TOKENS = [f"--tokens={SERIES}/rec/step_{step}" for step in (1000, 1500)]


def test_figures_of_two_recordings_are_compared(moegeom, place):
    layers = ("--layers", "0", "--detail")
    ran = moegeom(place, "diff", OLD, NEW, *TOKENS, *layers, forms=["table", "md"], code=0)
    screen = " ".join(ran.document["table"]["80"].split())
    assert "Tokens: 1,024 in 16 documents (step_1500)" in screen
    assert "Smallest change this run can catch (9 times in 10" in screen
    page = ran.document["md"]["80"]
    assert page.startswith("## moegeom diff: ")
    assert "| text/0 | rows changed by 11 %, no pattern |" in page
    assert sorted(path.name for path in place.iterdir() if path.suffix == ".moegeom") == []


def test_kept_results_tell_the_same_figures_of_the_layers_that_were_asked_for(moegeom, place):
    as_json = ("--format", "json")
    two = ("--layers", "1-2", "--out", "kept")
    one = moegeom(place, "diff", OLD, NEW, *TOKENS, *two, *as_json, code=0).document
    assert [router["router"] for router in one["routers"]] == ["text/1", "text/2"]
    assert {test["router"] for test in one["figures"]["tests"]} == {"text/1", "text/2"}
    sides = ("kept/a.moegeom", "kept/b.moegeom")
    other = moegeom(place, "diff", *sides, *as_json, code=0).document
    assert one["figures"] == other["figures"]
    assert {r["changes"][0]["word"] for r in other["routers"]} == {"trained on"}
    sizes = [[r["changes"][0]["size"] for r in d["routers"]] for d in (one, other)]
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.2)
    assert "32 projections" in other["notes"][0]
    mixed = moegeom(place, "diff", "kept/a.moegeom", OLD, "--layers", "1-2")
    assert "all 2 routers are identical" in mixed.out


def test_one_recording_serves_both_only_when_that_is_allowed(moegeom, refused, place):
    one = ("diff", OLD, NEW, TOKENS[1], "--layers", "1")
    refused(place, one, "--stale-inputs")
    ran = moegeom(place, *one, "--stale-inputs", "--unverified", code=0)
    assert "RECORDED FROM ANOTHER CHECKPOINT" in ran.words
    assert "same inputs" in ran.words


#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    (("nowhere", NEW), 3, "no such file"),
    (("rec", NEW), 3, ""),
    ((NEW, NEW, "--out", "x"), 2, "no --tokens"),
    ((NEW, NEW, "--tokens", "nowhere"), 3, ""),
    (("results", NEW, "--tokens", "rec"), 2, "measured before"),
    (("results", NEW, "--experts"), 2, "measured before"),
    (
        (OLD, NEW, *TOKENS, "--out", "taken"),
        2,
        "taken/b.moegeom is no folder of results; it is not replaced",
    ),
]


def test_what_cannot_be_meant_or_read_is_told(refused, place):
    (place / "taken/b.moegeom").mkdir(parents=True)
    for arguments, code, words in REFUSED:
        refused(place, ("diff", *arguments), words, code=code)


def some_documents(path: Path, source, documents: np.ndarray) -> str:
    """A recording of which some documents are left."""
    facts, whole = source.facts, source.facts.num_tokens
    columns = source.read_columns(0, whole)
    rows = np.isin(columns.document, documents)
    left = {name: array[rows] for name, array in vars(columns).items()}
    left["document"] = np.searchsorted(np.sort(documents), left["document"])
    values, chosen = (
        {router: read(router, 0, whole)[rows] for router in facts.routers}
        for read in (source.read_values, source.read_chosen)
    )
    same = {name: getattr(facts, name) for name in ("fingerprint", "engine", "domains")}
    columns = TokenColumns(**left)
    return str(recording_of(path, facts.stage, columns, values, chosen, **same, dtype="float32"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_other_documents_of_the_same_kind_change_nothing(tmp_path, seed):
    """One checkpoint on two halves of its documents: every significant figure is a false alarm."""
    source = open_tokens(str(SAMPLES.parent / SERIES / "rec/step_1500"))
    documents = np.random.default_rng(seed).permutation(source.facts.num_documents)
    halves = []
    for name, half in (("a", documents[:32]), ("b", documents[32:])):
        tokens = some_documents(tmp_path / f"rec-{name}", source, half)
        request = ScanRequest(str(SAMPLES.parent / NEW), tmp_path / name, tokens=tokens)
        halves.append(open_results(scan(request)))
    found = figure_changes(*halves)
    assert found is not None
    assert len(found.tests) > 100
    assert found.significant == []


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
    facts = {"checkpoint_name": checkpoint, "fingerprint": routers.fingerprint, "engine": "test"}
    domains = source.facts.domains
    recording_of(folder / name, "ids", columns, None, chosen, **facts, domains=domains)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The samples, an export ``folded`` of one of them, recordings of both runs."""
    folder = tmp_path_factory.mktemp("signoff")
    (folder / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    model = trained("olmoe-balanced/step_1500")
    smoothed(model, 1.5, True).write(folder / "folded")
    write_routed(folder, "rec_b", "folded", 0.01)
    write_routed(folder, "rec_a2", A, 0.001)
    return folder


def test_weights_alone_end_inconclusive_with_the_commands_that_go_on(moegeom, folder):
    ran = moegeom(folder, "signoff", A, "folded", code=4)
    assert ran.err == ""
    assert "passed effective router: layers 0-2 gain folded." in ran.words
    assert f"   fill in moegeom capture {A} --text FILE --keep ids --out REC_A\n" in ran.out
    assert "routing on text not known; 4 things not checked. exit 4" in ran.words


def test_two_recordings_of_the_sample_are_signed_off(moegeom, folder):
    limit = ("--rerun", "rec_a2", "--max-flipped", "0.05")
    ran = moegeom(folder, "signoff", A, "folded", *BOTH, *limit, forms=["table"], code=0)
    assert ran.err == ""
    said = " ".join(ran.document["table"]["80"].split())
    assert "VERDICT PASSED, signed off: all 4 lines passed; 5 things not checked." in said
    assert "of 1,024 tokens differ at one layer or more" in said
    assert "Within the limit of 5 % (--max-flipped)." in said
    assert "times as often" in said


def test_a_copy_is_not_taken_for_a_second_run_in_silence(moegeom, folder):
    for copy in ("copy", "again"):
        shutil.copytree(folder / REC_A, folder / copy)
    asked = (folder, "signoff", A, A, "--tokens", REC_A, "--tokens", "copy")
    said = moegeom(*asked, "--rerun", "rec_a2", code=4).words
    assert "6 things not checked" in said
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
REFUSED_BY_SIGNOFF = [
    ((A, "nowhere"), 3, "no such file"),
    ((A, "folded", "--tokens", "rec_b", "--tokens", REC_A), 3, "another checkpoint"),
    ((A, "folded", "--logprobs", "scored.csv"), 2, "--logprobs is about recordings"),
]


def test_what_signoff_cannot_mean_or_read_is_told(refused, folder):
    for arguments, code, words in REFUSED_BY_SIGNOFF:
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
    assert "5 things not checked" in moegeom(*asked).words
    scoring = (*asked, "--logprobs", "scored.csv")
    ran = moegeom(*scoring, code=0)
    assert ran.err == ""
    assert "a flip goes with" in ran.words
    assert "4 things not checked" in ran.words
    scored = moegeom(*scoring, "--format", "json").document["lines"][3]["evidence"]["between"][
        "log_probs"
    ]
    assert 0.25 < scored["mean"] < 0.75
    assert abs(scored["cost"]["nats"]) < 4.0 * scored["cost"]["error"]


EARLY = "olmoe-collapsed/step_100"
COLLAPSED = "sample_ckpts/olmoe-collapsed"
ARGUMENTS = ("track", f"{COLLAPSED}/step_*", "--tokens", f"{COLLAPSED}/rec/step_{{step}}")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """One folder for the module: the first command measures, the others go on from it."""
    made = tmp_path_factory.mktemp("track")
    (made / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return made


def test_every_form_shows_the_series_that_lies_beside_the_results(moegeom, measured):
    ran = moegeom(measured, *ARGUMENTS, forms=["table", "json", "md"], code=0)
    assert ran.err == ""
    forms = ran.document
    screen = " ".join(forms["table"]["80"].split())
    assert "olmoe-collapsed 3 checkpoints, steps 100 to 1500" in screen
    for words in ("driven by expert", "chance 0.25", "no onset"):
        assert words in screen
    document = json.loads(forms["json"]["80"])
    assert document == json.loads((measured / "runs/olmoe-collapsed.track/series.json").read_text())
    assert {"max_vio_global", "row_drift_max"} <= {c["name"] for c in document["columns"]}
    assert forms["md"]["80"].startswith("## moegeom track: olmoe-collapsed")


def test_a_picture_and_one_expert_come_from_a_run_that_measures_nothing(moegeom, measured):
    second = moegeom(measured, *ARGUMENTS, "--expert", "7", "--plot", "p.svg", code=0)
    assert "0 measured now, 3 before" in second.out
    assert "load of expert 7" in second.out
    rows = pq.read_table(measured / "runs/olmoe-collapsed.track/series.parquet").to_pylist()
    assert {"max_vio_global", "load of expert 7"} <= {row["column"] for row in rows}
    assert (measured / "p.svg").stat().st_size > 5000


def series(measured: Path, **steps: str) -> None:
    """Copies of samples under the names of steps."""
    for name, sample in steps.items():
        shutil.copytree(SAMPLES / sample, measured / name)


def test_an_unfinished_checkpoint_is_skipped_with_its_reason(moegeom, tmp_path):
    series(tmp_path, step_100=EARLY)
    (tmp_path / "step_700").mkdir()
    ran = moegeom(tmp_path, "track", "step_*", "--ascii", code=4)
    assert "skipped step_700: it is empty" in ran.words
    assert "none: weights alone" in ran.out
    assert "1 step; needs 2" in ran.words
    assert ran.out.isascii()


def test_an_earlier_state_fails_the_gate_and_every_report_says_so(moegeom, tmp_path):
    series(tmp_path, step_100=EARLY, step_600="olmoe-collapsed/step_600", step_700=EARLY)
    reports = [f"--report={kind}=out.{kind}" for kind in ("junit", "github", "md", "html")]
    forms = moegeom(tmp_path, "track", "step_*", *reports, forms=["table", "json"], code=1).document
    for columns, screen in forms["table"].items():
        assert widest(screen) <= int(columns)
        words = " ".join(screen.split())
        assert "step 700 holds the rows of step 100 again, bit for bit" in words
        assert "1 not (1 error)" in words
    for kind in ("junit", "github", "md", "html"):
        assert "MGT101" in (tmp_path / f"out.{kind}").read_text()
    document = json.loads(forms["json"]["80"])
    assert (document["verdict"], document["exit_code"]) == ("FAILED", 1)


def test_a_warning_fails_where_it_is_asked_to(moegeom, tmp_path):
    series(tmp_path, **{f"step_{n}": f"olmoe-collapsed/step_{n}" for n in (100, 600, 1500)})
    first, last = (tmp_path / f"step_{step}/model.safetensors" for step in (600, 1500))
    still = GATES[1]
    save_file(load_file(last) | {still: load_file(first)[still]}, last)
    for level, code in (("warning", 1), ("error", 0)):
        ran = moegeom(tmp_path, "track", "step_*", "--fail-on", level, code=code)
        assert "MGT104 layer 1: from step 600 on its rows stand still" in ran.words


#: Patterns that match nothing, and what is there instead.
UNMATCHED = {
    "nothing_*": "The current folder holds a, b, other.txt.",
    "none/step_*": "There is no folder none.",
    "a/step_*": "a holds step.",
    "*/nothing_*": "The current folder holds a, b, other.txt.",
    "nothing_1": "The current folder holds a, b, other.txt.",
}


def test_a_pattern_without_a_match_is_answered_with_what_is_there(refused, tmp_path):
    (tmp_path / "a/step").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "other.txt").write_text("")
    for pattern, hint in UNMATCHED.items():
        refusal = refused(tmp_path, ("track", pattern), code=2)
        assert refusal.startswith(f"error: {pattern}: no checkpoint matches.\n  hint: {hint}")
        assert "uote" not in refusal


STEPS = f"{COLLAPSED}/step_*"

#: What is typed, the exit code, and words of the refusal.
REFUSED_BY_TRACK = [
    ((STEPS, "--tokens", "rec/{step}"), 2, "there is no recording"),
    ((STEPS, "--expert", "3", "--out", "y"), 2, "weights alone"),
    ((STEPS, "--plot", "p.gif"), 2, ".svg"),
]


def test_what_cannot_be_meant_is_told(moegeom, measured):
    for arguments, code, words in REFUSED_BY_TRACK:
        ran = moegeom(measured, "track", *arguments, code=code)
        assert ran.out == ""
        assert words in ran.err
    recorded = ("--tokens", f"{COLLAPSED}/rec/step_100", "--layers", "0", "--out", "x")
    assert "stale" in moegeom(measured, "track", STEPS, *recorded, code=3).err
