"""`moegeom diff` as it is typed: exit codes, streams, samples, experts, results, false alarms."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.core.tokens import TokenColumns

ROOT = Path(__file__).resolve().parents[2]
SERIES = "sample_ckpts/olmoe-balanced"
OLD, NEW = f"{SERIES}/step_1000", f"{SERIES}/step_1500"
TOKENS = [f"--tokens={SERIES}/rec/step_{step}" for step in (1000, 1500)]
ORDER = [1, 0, 3, 2, *range(4, 16)]


@pytest.fixture
def folder(place) -> Path:
    return place


def words(text: str) -> str:
    return " ".join(text.split())


def permuted(folder: Path, name: str, with_experts: bool) -> str:
    """The newest sample with its experts in another order, or its router rows alone."""
    shutil.copytree(ROOT / NEW, folder / name)
    file = folder / name / "model.safetensors"
    before = load_file(file)
    after = {}
    for tensor, values in before.items():
        if tensor.endswith("mlp.gate.weight"):
            values = values[ORDER]
        head, found, rest = tensor.partition(".experts.")
        if found and with_experts:
            number, _, leaf = rest.partition(".")
            tensor = f"{head}.experts.{ORDER.index(int(number))}.{leaf}"
        after[tensor] = np.ascontiguousarray(values)
    save_file(after, file)
    return name


def test_a_checkpoint_is_identical_to_itself_and_to_itself_cut_into_files(moegeom, folder):
    ran = moegeom(folder, "diff", NEW, NEW)
    assert (ran.code, ran.err) == (0, "")
    assert "VERDICT  all 3 routers are identical." in ran.out
    assert "layer" not in ran.out.split("Not checked")[0].replace("layers", "layer")


def test_two_steps_of_a_training_differ_without_a_pattern(moegeom, folder):
    ran = moegeom(folder, "diff", OLD, NEW)
    assert (ran.code, ran.err) == (0, "")
    assert "no router is identical: layers 0-2 rows changed by 8.8 to 11 %, no pattern." in words(
        ran.out
    )
    assert "gain different" in ran.out


def test_figures_of_two_recordings_are_compared(moegeom, folder):
    ran = moegeom(folder, "diff", OLD, NEW, *TOKENS, "--detail", forms=["table", "md"])
    assert ran.code == 0, ran.err
    forms = json.loads(ran.out)
    for columns, screen in forms["table"].items():
        assert max(map(len, screen.splitlines())) <= int(columns)
    screen = words(forms["table"]["80"])
    assert "Tokens: 1,024 in 16 documents (step_1500)" in screen
    assert "Would have been found 9 times in 10" in screen
    assert forms["md"]["80"].startswith("## moegeom diff: ")
    assert "| text/0 | rows changed by 11 %, no pattern |" in forms["md"]["80"]
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".moegeom") == []


def test_kept_results_tell_the_same_figures(moegeom, folder):
    first = moegeom(folder, "diff", OLD, NEW, *TOKENS, "--out", "kept", "--format", "json")
    assert first.code == 0, first.err
    again = moegeom(folder, "diff", "kept/a.moegeom", "kept/b.moegeom", "--format", "json")
    assert again.code == 0, again.err
    one, other = json.loads(first.out), json.loads(again.out)
    assert one["figures"] == other["figures"]
    assert {r["changes"][0]["word"] for r in other["routers"]} == {"trained on"}
    sizes = [[r["changes"][0]["size"] for r in d["routers"]] for d in (one, other)]
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.2)
    assert "32 projections" in other["notes"][0]
    mixed = moegeom(folder, "diff", "kept/a.moegeom", OLD)
    assert "all 3 routers are identical" in mixed.out


def test_one_recording_serves_both_only_when_that_is_allowed(moegeom, folder):
    one = TOKENS[1]
    refused = moegeom(folder, "diff", OLD, NEW, one)
    assert refused.code == 3
    assert "--stale-inputs" in refused.err
    ran = moegeom(folder, "diff", OLD, NEW, one, "--stale-inputs", "--unverified")
    assert ran.code == 0, ran.err
    assert "RECORDED FROM ANOTHER CHECKPOINT" in words(ran.out)
    assert "same inputs" in words(ran.out)


@pytest.mark.parametrize("with_experts", [False, True])
def test_experts_tell_whether_a_permutation_did_harm(moegeom, folder, with_experts):
    name = permuted(folder, "permuted", with_experts)
    blind = moegeom(folder, "diff", NEW, name)
    assert "layers 0-2 permuted (4 of 16 rows)" in words(blind.out)
    assert "whether the experts moved along is not known: --experts" in words(blind.out)
    ran = moegeom(folder, "diff", NEW, name, "--experts")
    assert "bytes of headers and expert weights" in ran.err
    said = words(ran.out)
    assert ("all 16 experts moved along" in said) == with_experts
    assert ("and experts left behind" in said) != with_experts


def test_only_the_layers_that_were_asked_for_are_compared(moegeom, folder):
    ran = moegeom(folder, "diff", OLD, NEW, "--layers", "1-2", *TOKENS, "--format", "json")
    document = json.loads(ran.out)
    assert [router["router"] for router in document["routers"]] == ["text/1", "text/2"]
    assert {test["router"] for test in document["figures"]["tests"]} == {"text/1", "text/2"}


def test_other_families_are_told_beneath_the_verdict(moegeom, folder):
    ran = moegeom(folder, "diff", NEW, "sample_ckpts/deepseek-tiny/step_1500")
    assert ran.code == 0
    lines = ran.out.splitlines()
    told = [line for line in lines if line.startswith(("UNLIKE", "VERDICT"))]
    assert told[0].startswith("VERDICT  no router is identical")
    assert told[1] == "UNLIKE   family olmoe in A, deepseek_v3 in B"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere", NEW), 3, "no such file"),
        (("rec", NEW), 3, ""),
        ((NEW,), 2, "Missing argument"),
        ((NEW, NEW, "--out", "x"), 2, "no --tokens"),
        ((NEW, NEW, "--stale-inputs"), 2, "no --tokens"),
        ((NEW, NEW, "--tokens", "nowhere"), 3, ""),
        ((NEW, NEW, "--layers", "9"), 2, "no router"),
        ((NEW, NEW, "--format", "pdf"), 2, "pdf"),
        (("results", NEW, "--tokens", "rec"), 2, "measured before"),
        (("results", NEW, "--experts"), 2, "measured before"),
        (("results", "results", *["--tokens=rec"] * 3), 2, "two sides"),
    ],
)
def test_what_cannot_be_meant_or_read_is_told(moegeom, folder, arguments, code, said):
    ran = moegeom(folder, "diff", *arguments)
    assert ran.code == code, ran.out + ran.err
    assert ran.out == ""
    assert said in ran.err


def test_existing_results_are_not_overwritten(moegeom, folder):
    (folder / "kept/b.moegeom").mkdir(parents=True)
    ran = moegeom(folder, "diff", OLD, NEW, *TOKENS, "--out", "kept")
    assert ran.code == 2
    assert "kept/b.moegeom is no folder of results; it is not replaced" in ran.err
    assert not (folder / "kept/a.moegeom").exists()


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

    source = open_tokens(str(ROOT / SERIES / "rec/step_1500"), None, None, ())
    documents = np.random.default_rng(seed).permutation(source.facts.num_documents)
    halves = []
    for name, chosen in (("a", documents[:32]), ("b", documents[32:])):
        half = SomeDocuments(source, np.sort(chosen))
        request = ScanRequest(str(ROOT / NEW), tmp_path / name, tokens=half)
        halves.append(open_results(scan(request)))
    found = figure_changes(halves[0], halves[1])
    assert found is not None
    assert len(found.tests) > 100
    assert found.significant == []
