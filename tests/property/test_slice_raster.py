"""What is proved of a pixel stays true: for every rule, at every point, at every resolution."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from moegeom.core.router import GroupMask, LogitMap, Rule, Weights
from moegeom.geometry.selection import route
from moegeom.routing_cells.plane.raster import (
    Frame,
    PixelState,
    PlaneLength,
    PlaneRouter,
    plane_raster,
)

SIDES = (-1.5, 2.0, -1.0, 1.75)


@st.composite
def routers(draw):
    """Any rule of the house, with logits from flat to saturated, and equal experts among them."""
    score = draw(st.sampled_from(["identity", "softmax", "sigmoid", "sqrt_softplus"]))
    num_groups = draw(st.sampled_from([0, 2, 4]))
    experts = draw(st.sampled_from([4, 8, 12]))
    groups = None
    if num_groups:
        num_kept, fill = draw(st.integers(1, num_groups)), draw(st.sampled_from([-np.inf, 0.0]))
        groups = GroupMask(num_groups, num_kept, draw(st.sampled_from(["max", "top2_sum"])), fill)
    cap = draw(st.sampled_from([None, np.inf, 1.0, 30.0]))
    logit_map = None if cap is None else LogitMap(draw(st.sampled_from([0.5, 1.0, 3.0])), cap)
    has_bias = draw(st.booleans())
    rule = Rule(
        draw(st.integers(1, experts)), score, Weights("scores"), has_selection_bias=has_bias,
        groups=groups, logit_map=logit_map,
    )  # fmt: skip
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.01, 0.3, 1.0, 4.0, 30.0]))
    slope = size * generator.standard_normal((experts, 2))
    offset = size * generator.standard_normal(experts)
    bias = draw(st.sampled_from([0.01, 0.3])) * generator.standard_normal(experts)
    if draw(st.booleans()):  # two equal experts
        slope[1], offset[1], bias[1] = slope[0], offset[0], bias[0]
    length = None
    if draw(st.booleans()):
        ends = generator.standard_normal((3, 2)), generator.standard_normal(3)
        length = PlaneLength(*ends, float(size))
    return PlaneRouter(rule, slope, offset, bias if has_bias else None, length)


def chosen(router, points):
    """By the reference, ascending."""
    logits = points @ router.slope.T + router.offset
    if router.length is not None:
        length = np.linalg.norm(points @ router.length.slope.T + router.length.offset, axis=1)
        logits = logits * (router.length.scale / np.maximum(length, 1e-12))[:, None]
    return np.sort(route(logits, router.rule, router.selection_bias).chosen, axis=1)


def frame(width, height):
    return Frame(*SIDES, width, height)


@given(routers(), st.integers(1, 14), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_points_of_constant_pixels_choose_what_is_proved(router, width, height, seed):
    made = plane_raster(router, frame(width, height), depth=1)
    x0, x1, y0, y1 = SIDES
    shares = np.random.default_rng(seed).beta(0.3, 0.3, (1000, 2))
    points = np.array([x0, y0]) + shares * np.array([x1 - x0, y1 - y0])
    row = np.minimum((shares[:, 1] * height).astype(int), height - 1)
    column = np.minimum((shares[:, 0] * width).astype(int), width - 1)
    is_constant = made.state[row, column] == PixelState.CONSTANT
    claimed = np.array(made.expert_sets)[made.label[row, column]]
    assert_array_equal(claimed[is_constant], chosen(router, points)[is_constant])


@given(routers(), st.integers(1, 6), st.integers(1, 6), st.sampled_from([2, 3]))
@settings(max_examples=15)
def test_a_finer_picture_never_contradicts_a_coarser_one(router, width, height, factor):
    coarse = plane_raster(router, frame(width, height), depth=1)
    fine = plane_raster(router, frame(factor * width, factor * height), depth=1)
    parts = (height, factor, width, factor)
    state = fine.state.reshape(parts).transpose(0, 2, 1, 3)
    label = np.array(fine.expert_sets)[fine.label].reshape(*parts, -1).transpose(0, 2, 1, 3, 4)
    is_constant = coarse.state == PixelState.CONSTANT
    claimed = np.array(coarse.expert_sets)[coarse.label]
    assert not (state[is_constant] == PixelState.CROSSED).any()
    same = (label[is_constant] == claimed[is_constant][:, None, None, :]).all(axis=3)
    # an open pixel shows what float64 chooses at its centre, which lies in the proved pixel
    assert same.all()
    crossed = state[coarse.state == PixelState.CROSSED]
    labels = label[coarse.state == PixelState.CROSSED]
    is_same = (labels == labels[:, :1, :1, :]).all(axis=(1, 2, 3))
    assert not ((crossed == PixelState.CONSTANT).all(axis=(1, 2)) & is_same).any()
