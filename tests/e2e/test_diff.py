"""`moegeom diff` as it is typed: exit codes, streams, samples, experts, results, false alarms."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from moegeom.core.tokens import TokenColumns
from tests.e2e.conftest import changed, permuted, widest
from tests.short_samples import SAMPLES

SERIES = "sample_ckpts/olmoe-balanced"
OLD, NEW = f"{SERIES}/step_1000", f"{SERIES}/step_1500"
TOKENS = [f"--tokens={SERIES}/rec/step_{step}" for step in (1000, 1500)]


def test_a_checkpoint_is_identical_to_itself_and_another_step_differs_without_a_pattern(
    moegeom, place
):
    ran = moegeom(place, "diff", NEW, NEW, code=0)
    assert ran.err == ""
    assert "VERDICT  all 3 routers are identical." in ran.out
    assert "layer" not in ran.out.split("Not checked")[0].replace("layers", "layer")
    ran = moegeom(place, "diff", OLD, NEW, code=0)
    assert ran.err == ""
    changes = "no router is identical: layers 0-2 rows changed by 8.8 to 11 %, no pattern."
    assert changes in ran.words
    assert "gain different" in ran.out


def test_figures_of_two_recordings_are_compared(moegeom, place):
    layers = ("--layers", "0", "--detail")
    ran = moegeom(place, "diff", OLD, NEW, *TOKENS, *layers, forms=["table", "md"], code=0)
    for columns, screen in ran.document["table"].items():
        assert widest(screen) <= int(columns)
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


def test_experts_tell_whether_a_permutation_did_harm(moegeom, place):
    for moves in (False, True):
        change = functools.partial(permuted, with_experts=moves)
        name = changed(place, f"permuted-{moves}", change)
        blind = moegeom(place, "diff", NEW, name).words
        assert "layers 0-2 permuted (4 of 16 rows)" in blind
        assert "whether the experts moved along is not known: --experts" in blind
        ran = moegeom(place, "diff", NEW, name, "--experts")
        assert "bytes of headers and expert weights" in ran.err
        assert ("all 16 experts moved along" in ran.words) == moves
        assert ("and experts left behind" in ran.words) != moves


def test_other_families_are_told_beneath_the_verdict(moegeom, place):
    ran = moegeom(place, "diff", NEW, "sample_ckpts/deepseek-tiny/step_1500", code=0)
    told = [line for line in ran.out.splitlines() if line.startswith(("UNLIKE", "VERDICT"))]
    assert told[0].startswith("VERDICT  no router is identical")
    assert told[1] == "UNLIKE   family olmoe in A, deepseek_v3 in B"


#: What is typed, the exit code, and words of the refusal.
REFUSED = [
    (("nowhere", NEW), 3, "no such file"),
    (("rec", NEW), 3, ""),
    ((NEW, NEW, "--out", "x"), 2, "no --tokens"),
    ((NEW, NEW, "--stale-inputs"), 2, "no --tokens"),
    ((NEW, NEW, "--tokens", "nowhere"), 3, ""),
    ((NEW, NEW, "--layers", "9"), 2, "no router"),
    (("results", NEW, "--tokens", "rec"), 2, "measured before"),
    (("results", NEW, "--experts"), 2, "measured before"),
    (("results", "results", *["--tokens=rec"] * 3), 2, "two sides"),
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


class SomeDocuments:
    """A recording of which some documents are left."""

    def __init__(self, source, documents: np.ndarray) -> None:
        whole = source.facts.num_tokens
        columns = source.read_columns(0, whole)
        self._rows = np.flatnonzero(np.isin(columns.document, documents))
        self._source, self._whole = source, whole
        number = np.searchsorted(np.sort(documents), columns.document[self._rows])
        self._columns = TokenColumns(
            number.astype(np.int64),
            columns.position[self._rows],
            columns.token_id[self._rows],
            columns.domain[self._rows],
        )
        self.facts = dataclasses.replace(
            source.facts, num_tokens=len(self._rows), num_documents=len(documents)
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        fields = dataclasses.fields(TokenColumns)
        return TokenColumns(*(getattr(self._columns, f.name)[start:stop] for f in fields))

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        return self._source.read_values(router, 0, self._whole)[self._rows][start:stop]

    def read_chosen(self, router: str, start: int, stop: int) -> np.ndarray:
        return self._source.read_chosen(router, 0, self._whole)[self._rows][start:stop]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_other_documents_of_the_same_kind_change_nothing(tmp_path, seed):
    """One checkpoint on two halves of its documents: every significant figure is a false alarm."""
    from moegeom.pipeline import ScanRequest, scan
    from moegeom.results.reader import open_results
    from moegeom.studies.changes.figures import figure_changes
    from moegeom.tokens.open import open_tokens

    source = open_tokens(str(SAMPLES.parent / SERIES / "rec/step_1500"), None, None, ())
    documents = np.random.default_rng(seed).permutation(source.facts.num_documents)
    halves = []
    for name, chosen in (("a", documents[:32]), ("b", documents[32:])):
        half = SomeDocuments(source, np.sort(chosen))
        request = ScanRequest(str(SAMPLES.parent / NEW), tmp_path / name, tokens=half)
        halves.append(open_results(scan(request)))
    found = figure_changes(halves[0], halves[1])
    assert found is not None
    assert len(found.tests) > 100
    assert found.significant == []
