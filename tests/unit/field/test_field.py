"""Members of the field: their headers, what is planted in them, the lines that are typed on them."""

import json
import re
import resource

import numpy as np
import pytest

from benchmarks.field import making, page
from benchmarks.field.every_command_answers_within_its_budget import BUDGETS, sentence_of, typed
from benchmarks.field.lines import lines
from benchmarks.field.members import MEMBERS, OLMOE, size_of
from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.expert_tensors import open_experts
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.by_day import by_day

SMALL = by_day(sorted(MEMBERS), [OLMOE.name])


@pytest.fixture(scope="module", params=SMALL)
def made(request, tmp_path_factory):
    """A small member and its folder."""
    folder = tmp_path_factory.mktemp("member")
    member = MEMBERS[request.param].small()
    making.make(folder, member)
    return member, folder


def test_a_member_opens_with_the_names_shapes_and_dtypes_of_its_table(made):
    member, folder = made
    store = open_checkpoint(folder / "model")
    header = {name: store.info(name) for name in store.names()}
    opened = {name: (info.dtype, tuple(info.shape)) for name, info in header.items()}
    assert opened == {name: (dtype, shape) for name, dtype, shape in member.tensors()}


def test_routers_are_those_of_the_config(made):
    member, folder = made
    routers = load_routers(open_checkpoint(folder / "model")).routers
    assert [router.layer for router in routers] == list(member.with_routers)
    shapes = {(r.num_experts, r.hidden_size, r.rule.top_k) for r in routers}
    assert shapes == {(member.num_experts, member.hidden, member.top_k)}


def test_rows_of_the_collapsed_router_point_one_way_and_two_of_them_are_equal(made):
    member, folder = made
    routers = {r.layer: r for r in load_routers(open_checkpoint(folder / "model")).routers}
    least = {}
    for layer, router in routers.items():
        unit = router.weight / np.linalg.norm(router.weight, axis=1, keepdims=True)
        least[layer] = float((unit @ unit.T).min())
    assert least.pop(member.collapsed) > 0.99
    assert max(least.values()) < 0.9
    first, second = making.EQUAL
    rows = routers[member.collapsed].weight
    assert np.array_equal(rows[first], rows[second])


def test_checkpoint_b_differs_in_one_router(made):
    member, folder = made
    a, b = (load_routers(open_checkpoint(folder / n)).routers for n in ("model", "model_b"))
    changed = [x.layer for x, y in zip(a, b, strict=True) if not np.array_equal(x.weight, y.weight)]
    assert changed == [member.changed]


def test_experts_of_the_recorded_layer_are_there_and_tell_apart(made):
    member, folder = made
    store = open_checkpoint(folder / "model")
    routers = {r.layer: r for r in load_routers(store).routers}
    there = open_experts(store, routers[member.recorded])
    sizes = [np.sqrt(np.mean(there.read(e).gate[0] ** 2)) for e in range(member.num_experts)]
    assert min(sizes) > 0
    assert len(set(sizes)) == member.num_experts
    holes = open_experts(store, routers[member.collapsed])
    assert not holes.read(0).gate.any()


def test_a_recording_begins_with_the_outlier_and_holds_what_its_router_chooses(made):
    member, folder = made
    source = open_tokens(str(folder / "rec"))
    assert source.facts.num_tokens == member.num_tokens
    name = f"text/{member.recorded}"
    lengths = np.linalg.norm(source.read_values(name, 0, 512), axis=1)
    assert lengths[0] > 300 * np.median(lengths)
    assert len(np.unique(source.read_columns(0, 4096).document)) == 4096 // making.DOCUMENT


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_files_hold_every_tensor_once_and_are_about_equally_large(name):
    member = MEMBERS[name]
    files = member.files()
    assert len(files) == member.num_files
    held = [tensor for content in files.values() for tensor in content]
    assert held == list(member.tensors())
    sizes = [sum(map(size_of, content)) for content in files.values()]
    assert max(sizes) < 2 * np.mean(sizes) + max(map(size_of, held))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 30.53),
        ("DeepSeek-V3", 684.49),  # with the layer that predicts further tokens
        ("gpt-oss-120b", 116.83),
        ("GLM-4.5", 358.34),  # the same
        ("OLMoE-1B-7B", 6.92),
        ("Mixtral-8x7B", 46.70),
    ],
)
def test_a_member_has_as_many_parameters_as_its_publisher_counts(name, billions):
    numbers = 0
    for tensor, dtype, shape in MEMBERS[name].tensors():
        if not re.search("scale", tensor):
            numbers += int(np.prod(shape)) * (2 if dtype == "U8" else 1)  # two to a byte
    assert numbers / 1e9 == pytest.approx(billions, rel=3e-4)


def test_every_command_has_a_line_or_a_reason():
    every = list(lines())
    assert [line.name for line in every if "no value" in line.reason] == []
    assert {line.name for line in every} >= set(BUDGETS) - {""}


def test_a_run_counts_seconds_memory_and_bytes_of_its_process(tmp_path):
    (tmp_path / "model").mkdir()
    run = typed(["list", "routers", "model"], tmp_path, 100)
    assert (run.ending, run.exit_code) == ("refused", 3)
    assert run.seconds > 0
    # the peak of a process begins at that of the one that it was forked from
    own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 1e7 < run.memory_bytes < max(1e9, 1.01 * own)
    assert 1e5 < run.read_bytes < 1e9
    assert "error: " in run.errors


@pytest.mark.parametrize(
    ("screen", "layer", "is_named"),
    [
        ("ERROR MGI104  layer 12: experts 1 and 5", 12, True),
        ("ERROR MGI104  layer 12: experts 1 and 5", 1, False),
        ("layers 0-1,3: not looked at", 1, True),
        ("layers 0-1,3: not looked at", 3, True),
        ("layers 0-1,3: not looked at", 2, False),
        ("text/0-3       64      8", 2, True),
        ("12       -      1   ERROR", 12, True),
        ("0.12 of 12 experts", 12, False),
        ("1 error, 12 warnings; findings in 1 of 48 layers", 12, False),
        ("layer 12.5", 12, False),
    ],
)
def test_the_line_that_names_a_layer(screen, layer, is_named):
    assert bool(sentence_of(f"VERDICT  2 of 12\n{screen}\n", layer)) == is_named


def test_the_page_says_what_the_result_file_shows():
    document = json.loads(page.RESULTS.read_text("utf-8"))
    text = page.PAGE.read_text("utf-8")
    assert (
        text.partition(page.BEGIN)[2].partition(page.END)[0].strip() == page.table(document).strip()
    )
    assert {"claim", "core", "cores", "numpy", "python", "commit", "date"} <= document.keys()
