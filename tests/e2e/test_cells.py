"""``cells`` as people type it: enumeration, proofs, tables, pictures and refusals."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import InternalError, RecordingError, UsageError
from moegeom.router.load import load_routers
from moegeom.router.requested_family import RequestedFamily
from moegeom.routing_cells import router as study_router
from moegeom.routing_cells.exact.certificate_check import check_certificate
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.slices import read_named
from moegeom.routing_cells.study import cells as cells_of
from tests.oracle.exact_cells import certificate_of, exact_cells, expert_sets
from tests.short_samples import NUM_TOKENS, SAMPLES, short_samples

CKPT = str(SAMPLES / "olmoe-balanced/step_1500")
CURVED = str(SAMPLES / "deepseek-tiny/step_1500")
ON_CURVED = (
    *("research", "cells", CURVED, "--layer", "1", "--subspace", "pca:2"),
    *("--tokens", "sample_ckpts/deepseek-tiny/rec/step_1500"),
)
REC = "sample_ckpts/olmoe-balanced/rec/step_1500"
ON_SAMPLE = ("research", "cells", CKPT, "--tokens", REC, "--layer", "0")


@pytest.fixture(scope="module")
def matrix() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.standard_normal((9, 2)), generator.standard_normal(9)


@pytest.fixture
def place(tmp_path, matrix) -> Path:
    weight, bias = matrix
    np.savez(tmp_path / "router.npz", weight=weight, bias=bias)
    (tmp_path / "sample_ckpts").symlink_to(short_samples(), target_is_directory=True)
    return tmp_path


BARE = ("research", "cells", "--weights", "router.npz", "--top-k", "3")


def recording() -> str:
    return str(short_samples() / REC.partition("/")[2])


def of_matrix(folder: Path, **asked) -> CellsRequest:
    return CellsRequest(
        "", weights=folder / "router.npz", requested_family=RequestedFamily(top_k=3), **asked
    )


def of_sample(**asked) -> CellsRequest:
    return CellsRequest(CKPT, tokens=recording(), layers="0", **asked)


def test_tables_hold_the_cells_and_facets_of_a_bare_matrix(moegeom, place, matrix):
    ran = moegeom(place, *BARE, "--out", "found", "--certify", code=0)
    assert ran.err == ""
    exact = exact_cells(*matrix, 3)
    cells = pq.read_table(place / "found/cells.parquet").to_pylist()
    assert [tuple(row["expert_set"]) for row in cells] == expert_sets(exact)
    assert all(row["is_checked"] for row in cells)
    unbounded = {tuple(sorted(cell)) for cell in exact.unbounded}
    assert {tuple(row["expert_set"]) for row in cells if not row["is_bounded"]} == unbounded
    facets = pq.read_table(place / "found/facets.parquet").to_pylist()
    assert len(facets) == len(exact.facets)
    for row in facets:
        one, other = (set(cells[row[name]]["expert_set"]) for name in ("cell", "other_cell"))
        assert (sorted(one - other), sorted(other - one)) == (row["experts_out"], row["experts_in"])
    assert f"{len(cells)} of C(9, 3) = 84 sets" in ran.out
    assert f"a point inside of {len(cells)} cells was checked again" in ran.words


def test_certify_refuses_a_point_that_lies_in_another_cell(place, monkeypatch):
    made = study_router.with_witnesses

    def swapped(*found):
        whole = made(*found)
        return dataclasses.replace(whole, witness=whole.witness[::-1])

    monkeypatch.setattr(study_router, "with_witnesses", swapped)
    with pytest.raises(InternalError, match=r"the witness of cell .* fails its check"):
        cells_of(of_matrix(place, out=place / "found", certify=True))
    assert not (place / "found").exists()
    unchecked = cells_of(of_matrix(place, out=place / "found"))
    assert [router.num_checked for router in unchecked.routers] == [None]
    checked = pq.read_table(place / "found/cells.parquet")["is_checked"]
    assert checked.null_count == len(checked) > 1


def test_regions_in_no_cell_are_the_cells_that_broken_ties_add(moegeom, tmp_path):
    """Equal experts tie for the last place on whole regions, and a slice keeps them equal."""
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((17, 64)).astype(np.float32)
    weight[16], weight[8] = weight[0], weight[3]
    np.savez(tmp_path / "router.npz", weight=weight)
    asked = "research cells --weights router.npz --top-k 4 --subspace random:2".split()
    strict, broken = (
        moegeom(tmp_path, *asked, *more, "--format", "json").document["routers"][0]
        for more in ((), ("--tie-broken",))
    )
    more = broken["cells"]["num_cells"] - strict["cells"]["num_cells"]
    assert strict["cells"]["num_tied"] == more > 0
    assert (strict["num_equal"], broken["num_equal"]) == (4, 0)
    said = moegeom(tmp_path, *asked, COLUMNS="80").words
    assert f"{more} regions of the slice are in no cell: 4 of its experts are equal" in said


def test_a_certificate_from_the_screen_passes_an_independent_check(moegeom, place, matrix):
    weight, bias = matrix
    cells = set(expert_sets(exact_cells(weight, bias, 3)))
    for expert_set in ((0, 1, 2), next(iter(sorted(cells)))):
        asked = ",".join(map(str, expert_set))
        ran = moegeom(place, *BARE, "--expert-set", asked, "--certify", "--format", "json")
        (answer,) = ran.document["answers"]
        assert answer["is_cell"] == (expert_set in cells)
        assert answer["is_checked"]
        check_certificate(weight, bias, expert_set, certificate_of(answer["certificate"]))


def test_a_whole_router_has_every_set_as_a_cell_and_a_point_in_each(moegeom, tmp_path):
    whole = ("research", "cells", CKPT, "--layer", "0")
    assert "all C(16, 4) = 1,820 sets" in moegeom(tmp_path, *whole, code=0).out
    asked = ("--expert-set", "3,9,11,15", "--certify", "--format", "json")
    (answer,) = moegeom(tmp_path, *whole, *asked).document["answers"]
    router = load_routers(open_checkpoint(CKPT)).routers[0]
    point = np.array([float(x) for x in certificate_of(answer["certificate"]).point])
    assert sorted(np.argsort(-(router.weight.astype(np.float64) @ point))[:4]) == [3, 9, 11, 15]
    assert answer["margin"] > 1e-3


@pytest.mark.nightly
def test_witnesses_of_a_slice_choose_their_expert_set_as_router_inputs(moegeom, place):
    ran = moegeom(place, *ON_SAMPLE, "--subspace", "pca:3", "--out", "found", code=0)
    rows = pq.read_table(place / "found/cells.parquet").to_pylist()
    router = load_routers(open_checkpoint(CKPT)).routers[0]
    inputs = np.array([row["witness_input"] for row in rows])
    chosen = np.sort(np.argsort(-(inputs @ router.weight.T.astype(np.float64)))[:, :4], axis=1)
    assert chosen.tolist() == [row["expert_set"] for row in rows]
    # every token is drawn somewhere
    assert sum(row["num_tokens"] for row in rows) == NUM_TOKENS
    assert sum(row["num_own_tokens"] for row in rows) == int(
        ran.out.split("tokens   ")[-1].split(" of ")[0].replace(",", "")
    )


def test_a_slice_that_was_written_is_read_again(moegeom, place):
    random = ("--subspace", "random:2", "--seed", "5")
    moegeom(place, *ON_SAMPLE, *random, "--out", "one", code=0)
    slice_file = str(place / "one/slices/text.0.npz")
    moegeom(place, *ON_SAMPLE, "--subspace", slice_file, "--out", "two", code=0)
    one, two = (pq.read_table(place / name / "cells.parquet") for name in ("one", "two"))
    assert one.equals(two)


#: What is drawn, and as which kind of file.
PICTURES = [
    (("--caption",), "pdf"),
    (("--view", "expert:3"), "svg"),
    (("--subspace", "pca:3"), "svg"),
    (("--subspace", "plane:5,90,700"), "png"),
    (("--subspace", "circle:5,900"), "svg"),
]


@pytest.mark.parametrize(("arguments", "ending"), PICTURES)
def test_every_kind_of_slice_is_drawn(moegeom, place, arguments, ending):
    ran = moegeom(place, *ON_SAMPLE, *arguments, "--plot", f"figure.{ending}", code=0)
    assert (place / f"figure.{ending}").stat().st_size > 10_000
    assert f"figure.{ending}" in ran.out


def test_curved_facets_are_drawn_by_the_pixel_and_not_listed(moegeom, refused, place):
    refused(place, ("research", "cells", CURVED, "--layer", "1"), "they are no polyhedra")
    ran = moegeom(place, *ON_CURVED, "--plot", "figure.png", code=0)
    assert "pixels are undecided" in ran.words


@pytest.mark.nightly
def test_a_budget_of_vertices_is_said_and_lists_nothing(moegeom, place):
    on_four = (*ON_SAMPLE, "--subspace", "pca:4", "--vertices")
    said = moegeom(place, *on_four, "50", "--out", "found", code=4).words
    assert "more than the 50 vertices that --vertices allows; a random router has about" in said
    enough = said.split("Try --vertices ")[1].split()[0]
    moegeom(place, *on_four, enough, code=0)
    assert pq.read_table(place / "found/cells.parquet").num_rows == 0


def test_the_limit_that_a_walk_cut_short_names_is_enough_for_it(place):
    (cut,) = cells_of(of_matrix(place, vertices=3)).routers
    assert (cut.outcome, cut.cells) == ("unfinished", None)
    assert cut.cut_short is not None
    assert cut.cut_short.most == 3
    assert cut.cut_short.enough is not None
    (whole,) = cells_of(of_matrix(place, vertices=cut.cut_short.enough)).routers
    assert whole.outcome == "cells"


#: What cannot be meant, and words of the sentence that refuses it.
REFUSED = [
    (("research", "cells", "--certify"), "expected a checkpoint"),
    (("research", "cells", CKPT, "--weights", "router.npz", "--top-k", "3"), "not both"),
    (("research", "cells", "--weights", "router.npz"), "--top-k"),
    (("research", "cells", "--weights", "router.npz", "--top-k", "10"), "1 to 9"),
    ((*BARE, "--expert-set", "1,2"), "expected 3 different experts"),
    ((*BARE, "--expert-set", "1,2,2"), "expected 3 different experts"),
    ((*BARE, "--expert-set", "1,x"), "expected numbers"),
    ((*BARE, "--expert-set", "0-999999999"), "expected numbers"),
    ((*BARE, "--subspace", "pca:2"), "--tokens"),
    ((*BARE, "--subspace", "random:3"), "from 1 to 2"),
    ((*BARE, "--subspace", "sphere"), "expected full, pca:D"),
    ((*BARE, "--out", "found", "--plot", "x.bmp"), "x.bmp"),
    ((*BARE, "--plot", "x.svg", "--view", "expert:20"), "expert 20 of 9"),
    ((*BARE, "--plot", "x.svg", "--view", "expert:a"), "expected a number"),
    ((*BARE, "--plot", "x.svg", "--view", "sky"), "sky"),
    ((*BARE, "--certify"), "--certify goes with"),
    ((*BARE, "--caption"), "--caption goes with --plot"),
    ((*BARE, "--expert-set", "0,1,2", "--tie-broken"), "without --tie-broken"),
    ((*BARE, "--plot", "nowhere/x.svg"), "nowhere/x.svg: cannot be written"),
    ((*BARE, "--layer", "0"), "--layer goes with a checkpoint"),
    (
        ("research", "cells", CKPT, "--layer", "0", "--out", "found"),
        "every set of 4 experts is a cell",
    ),
    ((*ON_SAMPLE, "--subspace", "circle:5,900", "--out", "found"), "--out writes lists"),
    ((*ON_SAMPLE, "--subspace", "plane:1,2"), "expected tokens plane:A,B,C"),
    ((*ON_SAMPLE, "--subspace", "plane:1,2,99999"), "token 99999"),
    ((*ON_SAMPLE, "--subspace", "plane:1,2,2"), "one line"),
    ((*ON_SAMPLE, "--subspace", "pca:5", "--plot", "x.svg"), "2 or 3 dimensions"),
    (("research", "cells", CKPT, "--plot", "x.svg"), "--layer"),
]


def test_what_cannot_be_meant_is_refused_in_a_sentence(refused, place):
    for arguments, words in REFUSED:
        refused(place, arguments, words, code=2)


#: Parameters that a command does not have, and words of the sentence that refuses them.
MEANT = [
    ({"frame": -1.0}, "frame -1: expected a positive number"),
    ({"random_routers": 1001}, "random_routers 1001: expected 0 to 1,000"),
    ({"expert_set": (0, 1, 2), "random_routers": 3}, "--expert-set goes without random_routers"),
    ({"pixels": 4}, "pixels 4: expected 8 to 4,096"),
]


def test_a_request_names_its_parameters_as_they_are_given(place):
    for asked, words in MEANT:
        with pytest.raises(UsageError, match=words):
            cells_of(of_matrix(place, **asked))


#: Arrays that are no matrix, and words of the sentence that refuses them.
NO_MATRIX: list[tuple[dict[str, np.ndarray], str]] = [
    ({"w": np.ones((3, 2))}, "expected weight"),
    ({"weight": np.ones(3)}, "expected (experts, dims)"),
    ({"weight": np.ones((3, 2)), "bias": np.ones(2)}, "expected (3,)"),
    ({"weight": np.full((3, 2), np.nan)}, "not finite"),
    ({"weight": np.array([["a"]])}, "expected numbers"),
    ({"weight": np.full((3, 2), 2**53 + 1)}, "does not tell apart"),
]


def test_files_that_hold_no_matrix_are_refused(refused, tmp_path):
    for arrays, words in NO_MATRIX:
        np.savez(tmp_path / "router.npz", **arrays)
        refused(tmp_path, BARE, words)
    (tmp_path / "router.npz").write_bytes(b"PK\x03\x04 and nothing else")
    refused(tmp_path, BARE, "router.npz: truncated")
    for name in ("w.npy", "w.npz", "w"):
        with (tmp_path / name).open("wb") as stream:
            np.save(stream, np.eye(4))
        alone = f"{name}: this is a .npy file, which holds one array without a name"
        typed = ("research", "cells", "--weights", name, "--top-k", "2")
        refusal = refused(tmp_path, typed, alone, "numpy.savez writes one: weight=W")
        assert "torch" not in refusal
    np.savez(tmp_path / "router.npz", weight=np.eye(4, 3))
    refused(tmp_path, (*BARE, "--subspace", "w.npz"), "numpy.savez writes one: centre=c")


def test_a_file_that_is_not_there_comes_without_advice_on_writing_one(tmp_path):
    with pytest.raises(RecordingError, match="cannot be read") as refused:
        read_named(tmp_path / "w.npz", "numpy.savez writes one.")
    assert refused.value.hint == ""
