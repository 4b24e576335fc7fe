"""Inputs that lie on a device already are counted as a scan of them would count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.tokens import TILE
from moegeom.engine.devices.resident import DeviceFold, Tensors, device_fold
from moegeom.engine.loop import Pace
from moegeom.kernels.cuda.route import ON_DEVICE
from tests.unit.scan.engines.scanned import (
    COUNTED,
    DISTANCES,
    Recorded,
    assert_equal,
    bf16,
    emulated,
    exact_product,
    inputs,
    on_devices,
    on_processor,
    router_of,
    task_of,
    without_labels,
)

TOKENS = 3 * TILE + 50


def fold_of(router=None, reductions=COUNTED, source=None, device=None, **changes) -> DeviceFold:
    router = router or router_of()
    source = source or without_labels(inputs(10, router.hidden_size))
    task = task_of(router, source, reductions, **changes)
    return DeviceFold(task, device or emulated(product=exact_product)[0])


def pieces_of(values: np.ndarray, seed: int) -> list[np.ndarray]:
    """Neighbouring runs of rows, of any length."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.choice(np.arange(1, len(values)), 6, replace=False))
    return np.split(values, cuts)


def some_router(name: str):
    bias = {"selection_bias": np.linspace(-0.1, 0.1, 12, dtype=np.float32)}
    return router_of(score="sigmoid", **bias) if name == "curved" else router_of()


@pytest.mark.parametrize("router", ["straight", "curved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1])
def test_tensors_cut_anywhere_give_the_states_of_a_scan(router, dtype, seed):
    router = some_router(router)
    names = (*COUNTED, *(DISTANCES if router.rule.is_affine else ()))
    values = inputs(TOKENS, 8)
    values[::60] *= 128  # outliers
    source = without_labels(bf16(values) if dtype == "bfloat16" else values)
    task = task_of(router, source, names, typical_norm=3.0)
    exact = {"product": exact_product}
    scanned = on_devices(task, names, devices=emulated(**exact), pace=Pace(TILE, 1))
    fold = DeviceFold(task, emulated(seed=seed, **exact)[0])
    held = source.values.view(np.uint16) if dtype == "bfloat16" else source.values
    for piece in pieces_of(held, seed):
        fold.take(piece)
    found = fold.progress()
    assert found.states["token_counts"]["counts"][-1].sum() > 40
    assert found.num_tokens == TOKENS
    assert_equal(dataclasses.replace(found, next_tile=scanned.next_tile), scanned)


def test_what_the_processor_counts_is_counted():
    source = without_labels(inputs(TOKENS, 8))
    task = task_of(router_of(), source, COUNTED)
    fold = DeviceFold(task, emulated()[0])
    fold.take(source.values)
    found = fold.progress()
    assert_equal(dataclasses.replace(found, next_tile=4), on_processor(task, COUNTED))


def test_progress_may_be_asked_at_any_time_and_counts_only_what_was_taken():
    fold, values = fold_of(), inputs(1000, 8)
    for taken in (0, 400, 1000):
        if taken:
            fold.take(values[: taken - fold.progress().num_tokens])
        found = fold.progress()
        assert found.num_tokens == taken
        assert found.states["token_counts"]["counts"][..., 0].sum() == taken
        assert found.num_non_finite == 0


def test_only_what_was_asked_is_counted_and_the_number_of_tokens_always():
    fold = fold_of(reductions=("expert_counts",))
    fold.take(inputs(100, 8))
    assert set(fold.progress().states) == {"token_counts", "expert_counts"}


def test_tokens_that_are_not_finite_are_counted_as_lost():
    fold, values = fold_of(), inputs(300, 8)
    values[[5, 299], 2] = np.nan, np.inf
    values[7] = np.float32(3e38) * np.sign(router_of().weight[0])
    fold.take(values)
    fold.take(values[:6])
    found = fold.progress()
    assert (found.num_tokens, found.num_non_finite) == (306, 4)
    assert found.states["expert_counts"]["counts"].sum() == 3 * 302


def test_a_tensor_of_torch_is_counted_where_it_is():
    torch = pytest.importorskip("torch")
    values = inputs(300, 8)
    fold, expected = fold_of(), fold_of()
    fold.take(torch.from_numpy(values))
    expected.take(values)
    assert_equal(fold.progress(), expected.progress())


def test_a_tensor_that_is_not_c_ordered_is_counted_as_its_rows_are():
    values = inputs(300, 8)
    fold, expected = fold_of(reductions=(*COUNTED, *DISTANCES)), fold_of()
    fold.take(np.asfortranarray(values))
    expected.take(values)
    assert set(fold.progress().states) == {*COUNTED, *DISTANCES}
    for name in COUNTED:
        np.testing.assert_array_equal(
            fold.progress().states[name]["counts"], expected.progress().states[name]["counts"]
        )


def test_a_fold_that_is_dropped_leaves_no_work_that_writes_into_its_memory():
    device = emulated(product=exact_product)[0]
    fold = fold_of(device=device)
    fold.take(inputs(300, 8))
    assert any(queue.waiting for queue in device.queues)
    del fold
    assert not any(queue.waiting for queue in device.queues)
    assert device.used == 0


def test_memory_grows_with_the_longest_tensor_alone():
    device = emulated(product=exact_product)[0]
    fold, held = fold_of(device=device), []
    for tokens in (100, 50, 100, 200, 150):
        fold.take(inputs(tokens, 8))
        held.append(device.used)
    per_token = 4 * 12 + 8  # logits, and a length
    assert np.diff(held).tolist() == [0, 0, 100 * per_token, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        inputs(10, 9),
        inputs(10, 8).astype(np.float64),
        inputs(10, 8).astype(np.float16),
        inputs(80, 8)[:, 0],
        inputs(16, 8).reshape(2, 8, 8),
    ],
    ids=["width", "float64", "float16", "1 axis", "3 axes"],
)
def test_tensors_of_another_shape_or_dtype_are_refused_by_name(tensor):
    fold = fold_of()
    with pytest.raises(UsageError) as refused:
        fold.take(tensor)
    shape = " x ".join(map(str, tensor.shape))
    assert f"A tensor of {shape} numbers in {tensor.dtype.name}" in str(refused.value)
    assert "router text/0; expected tokens x 8 in bfloat16 or float32." in str(refused.value)
    assert fold.progress().num_tokens == 0


def test_reductions_that_devices_do_not_keep_are_refused_by_name():
    with pytest.raises(UsageError, match=r"^A device does not keep expert_sets, top1\.") as refused:
        fold_of(reductions=("token_counts", "top1", "expert_sets"))
    assert f"Known: {', '.join(ON_DEVICE)}." in str(refused.value)


def test_rules_that_devices_do_not_route_are_refused_with_the_reason():
    too_many = router_of(1025, 8, 2)
    with pytest.raises(UsageError, match=r"Router text/0 is not routed .* more than 1024 experts"):
        fold_of(too_many, ("token_counts",))
    in_float64 = router_of(weight=router_of().weight.astype(np.float64))
    with pytest.raises(UsageError, match="rows are stored in float64"):
        fold_of(in_float64, ("token_counts",))


# ------------------------------------------------------------------------------ wanted of the fold


def test_a_tensor_without_tokens_is_nothing_to_do():
    fold = fold_of()
    for tokens in (0, 100, 0):
        fold.take(inputs(100, 8)[:tokens])
    assert fold.progress().num_tokens == 100


def test_a_tensor_of_another_dtype_than_the_first_is_refused_or_counted():
    """Logits of three terms are three times as wide as the room that float32 has made."""
    fold, values = fold_of(), inputs(300, 8)
    fold.take(values)
    try:
        fold.take(bf16(values[:200]).view(np.uint16))
    except UsageError:
        return
    assert fold.progress().states["token_counts"]["counts"][..., 0].sum() == 500


def test_a_task_on_recorded_logits_is_refused():
    with pytest.raises(UsageError):
        fold_of(source=Recorded(inputs(100, 12), "logits"), reductions=("token_counts",))


def test_a_task_that_leaves_out_positions_is_refused():
    with pytest.raises(UsageError):
        fold_of(exclude_first=5)


def test_distances_to_curved_boundaries_are_refused():
    with pytest.raises(UsageError):
        fold_of(some_router("curved"), ("token_counts", "distance_histogram"))


def test_a_fold_of_a_router_alone_needs_no_recording():
    router, values = some_router("straight"), inputs(700, 8)
    names = ("expert_counts", "distance_histogram")
    fold = device_fold(router, names, emulated(product=exact_product)[0])
    fold.take(values)
    found = fold.progress()
    expected = fold_of(router, names)
    expected.take(values)
    for name in names:
        np.testing.assert_array_equal(
            found.states[name]["counts"], expected.progress().states[name]["counts"]
        )
    with pytest.raises(InternalError, match="handed over"):
        Tensors(router.name).read_values(router.name, 0, 1)
