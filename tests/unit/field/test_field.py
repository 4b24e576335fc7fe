"""Members of the field: their headers and routers, and the lines that are typed on them."""

import json

import pytest

from benchmarks.field import making, page
from benchmarks.field.every_command_answers_within_its_budget import BUDGETS
from benchmarks.field.lines import lines
from benchmarks.field.members import MEMBERS, OLMOE
from moegeom.checkpoint.open import open_checkpoint
from moegeom.router.load import load_routers
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


def test_every_command_has_a_line_or_a_reason():
    every = list(lines())
    assert [line.name for line in every if "no value" in line.reason] == []
    assert {line.name for line in every} >= set(BUDGETS) - {""}


def test_the_page_says_what_the_result_file_shows():
    document = json.loads(page.RESULTS.read_text("utf-8"))
    text = page.PAGE.read_text("utf-8")
    assert (
        text.partition(page.BEGIN)[2].partition(page.END)[0].strip() == page.table(document).strip()
    )
    assert {"claim", "core", "cores", "numpy", "python", "commit", "date"} <= document.keys()
