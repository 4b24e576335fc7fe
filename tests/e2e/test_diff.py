"""`moegeom diff` as it is typed: exit codes, streams, samples, experts, results, false alarms."""

from pathlib import Path

import numpy as np
import pytest

from moegeom.core.tokens import TokenColumns
from moegeom.pipeline import ScanRequest, scan
from moegeom.results.reader import open_results
from moegeom.studies.diff.study import figure_changes
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from tests.short_samples import SAMPLES

SERIES = "sample_ckpts/olmoe-balanced"
OLD, NEW = f"{SERIES}/step_1000", f"{SERIES}/step_1500"
TOKENS = [f"--tokens={SERIES}/rec/step_{step}" for step in (1000, 1500)]


def test_figures_of_two_recordings_are_compared(moegeom, place):
    layers = ("--layers", "0", "--detail")
    ran = moegeom(place, "diff", OLD, NEW, *TOKENS, *layers, forms=["table", "md"], code=0)
    screen = " ".join(ran.document["table"]["80"].split())
    assert "Tokens: 1,024 in 16 documents (step_1500)" in screen
    assert "Would have been found 9 times in 10" in screen
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
    assert "both routers are identical" in mixed.out


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
    with RecordingWriter(
        *(path, facts.stage, facts.routers),
        fingerprint=facts.fingerprint,
        engine=facts.engine,
        domains=facts.domains,
        dtype="float32",
    ) as writer:
        values, chosen = (
            {router: read(router, 0, whole)[rows] for router in facts.routers}
            for read in (source.read_values, source.read_chosen)
        )
        writer.append(TokenColumns(**left), values, chosen)
    return str(path)


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
