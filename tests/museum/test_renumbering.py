"""Rows that changed places alone are found, and consistent renumbering is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from tests.museum.exhibit_renumbering import INCIDENTS, ROWS_SORTED_AS_TEXT, olmoe
from tests.museum.gallery import all_cases, label
from tests.museum.healthy import softmax_model
from tests.museum.renumbering import permuted, text_order, within_groups


@pytest.mark.parametrize(
    ("incident", "case"), all_cases(INCIDENTS), ids=[label(*pair) for pair in all_cases(INCIDENTS)]
)
def test_the_gate_says_exactly_what_the_table_states(museum, incident, case):
    museum.confirm(incident, case)


def test_text_order_is_the_order_of_strings():
    assert text_order(12) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_nothing_leaves_its_group():
    order = np.array(within_groups(32, 4))
    assert sorted(order) == list(range(32))
    groups = order.reshape(4, 8) // 8
    assert (groups == groups[:, :1]).all()


def test_renumbering_twice_the_other_way_gives_the_checkpoint_back():
    order = text_order(16)
    there = permuted(olmoe(), order, ("weight", "experts"))
    back = permuted(there, np.argsort(order).tolist(), ("weight", "experts"))
    assert back.tensors.keys() == olmoe().tensors.keys()
    for name, tensor in olmoe().tensors.items():
        np.testing.assert_array_equal(back.tensors[name].view("u1"), tensor.view("u1"), name)


def test_the_finding_says_which_rows_changed_places(museum):
    finding = museum.visit(ROWS_SORTED_AS_TEXT, ROWS_SORTED_AS_TEXT.sizes[0]).of("MGI121")
    assert "2 was 3, 3 was 2" in finding.title
    assert "16 of 16 experts are where they were" in finding.detail


def test_without_experts_in_the_file_renumbered_rows_are_an_error_all_the_same(museum):
    model = softmax_model()
    seen = museum.show(permuted(model, text_order(32), ("weight",)), model)
    assert seen.codes == ("MGI121",)
    assert seen.exit_code == 1
    assert "is not known" in seen.of("MGI121").detail
