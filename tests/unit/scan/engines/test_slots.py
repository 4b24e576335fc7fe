"""How much memory a batch takes, and that a set of slots is there whole or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.tokens import TILE
from moegeom.engine.devices.slots import SLOTS, input_reader, make_slots, product_tokens
from moegeom.kernels.cuda.device import OutOfDeviceMemory
from tests.unit.scan.engines.scanned import (
    COUNTED,
    emulated,
    every_reduction,
    inputs,
    router_of,
    task_of,
)
from tests.unit.scan.made import Recorded


@given(
    st.integers(1, 2**20),
    st.integers(0, 2**38),
    st.integers(0, 2**20),
    st.none() | st.integers(1, 2**24),
)
def test_a_batch_is_a_power_of_two_of_tiles_within_its_bounds(row_bytes, free, stream, wished):
    tokens = product_tokens(row_bytes, free, stream, wished)
    tiles = tokens // TILE
    assert tokens == tiles * TILE and tiles & (tiles - 1) == 0
    assert TILE <= tokens <= 2**16
    if tokens > TILE:  # one tile is taken whatever it costs
        assert wished is None or tokens <= wished
        assert tokens < 2 * stream
        assert tokens * row_bytes <= 2**28
        assert 2 * SLOTS * tokens * row_bytes <= 0.8 * free


def test_batches_of_usual_widths_are_as_large_as_they_should_be():
    batches = {
        (4096, 2**37, 10**9, None): 2**16,
        (4096, 2**37, 10**9, 2**15): 2**15,
        (4096, 2**37, 10**9, 2**15 - 1): 2**14,
        (4096, 2**37, 10**9, 1): TILE,
        (8192, 2**37, 10**9, None): 2**15,
        (4096, 0, 10**9, None): TILE,
        (4096, 2**30, 10**9, None): 2**15,
        (4096, 2**37, 4096, None): 4096,
        (4096, 2**37, 4097, None): 8192,
        (4096, 2**37, 0, None): TILE,
    }
    assert {asked: product_tokens(*asked) for asked in batches} == batches


def slots_of(device, tokens: int = TILE, with_answers: bool = True):
    source = Recorded(inputs(100, 8))
    task = task_of(router_of(), source, every_reduction(router_of(), source))
    return make_slots(task, device, input_reader(task), COUNTED, tokens, with_answers)


@pytest.mark.parametrize("with_answers", [True, False])
def test_slots_share_a_router_and_counters_and_nothing_else(with_answers):
    device = emulated()[0]
    slots = slots_of(device, TILE, with_answers)
    assert len(slots) == SLOTS
    own = ("queue", "values", "label", "device_values", "device_label", "device_logits")
    for name in ("router", "counters", *own):
        assert len({id(getattr(slot, name)) for slot in slots}) == (SLOTS if name in own else 1)
    assert [set(slot.answers) == {"is_lost"} for slot in slots] == [not with_answers] * SLOTS
    for name in COUNTED:  # which begin at zero in memory that does not
        counts = device.get(getattr(slots[0].counters, name))
        assert counts.dtype == np.uint64 and not counts.any()
    # a slot more costs as much as the one before
    one_tile = device.used
    del slots
    assert device.used == 0
    slots = slots_of(device, 2 * TILE, with_answers)
    assert slots and one_tile < device.used < 2 * one_tile


def test_slots_that_do_not_fit_leave_nothing_behind():
    device = emulated()[0]
    slots = slots_of(device)
    needed = device.used
    del slots
    for room in range(0, needed, needed // 7):
        device = emulated(room=room)[0]
        with pytest.raises(OutOfDeviceMemory):
            slots_of(device)
        assert device.used == 0
    device = emulated(room=needed)[0]
    assert slots_of(device) and device.used == needed
