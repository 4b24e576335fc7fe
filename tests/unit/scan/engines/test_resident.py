"""Inputs that lie on a device already are counted as a scan of them would count."""

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
    assert_equal,
    bf16,
    emulated,
    exact_product,
    inputs,
    on_devices,
    router_of,
    task_of,
    without_labels,
)
from tests.unit.scan.made import Recorded

TOKENS = 3 * TILE + 50
CURVED = router_of(score="sigmoid", selection_bias=np.linspace(-0.1, 0.1, 12, dtype=np.float32))


def fold_of(router=None, reductions=COUNTED, source=None, device=None, **changes) -> DeviceFold:
    router = router or router_of()
    source = source or without_labels(inputs(10, router.hidden_size))
    task = task_of(router, source, reductions, **changes)
    return DeviceFold(task, device or emulated(product=exact_product)[0])


def folded(*tensors: np.ndarray, **fold):
    """The progress of a fold that took these."""
    made = fold_of(**fold)
    for tensor in tensors:
        made.take(tensor)
    return made.progress()


@pytest.mark.parametrize(
    ("router", "dtype", "seed"), [(router_of(), "float32", 0), (CURVED, "bfloat16", 1)]
)
def test_tensors_cut_anywhere_give_the_states_of_a_scan(router, dtype, seed):
    names = (*COUNTED, *(DISTANCES if router.rule.is_affine else ()))
    values = inputs(TOKENS, 8)
    values[::60] *= 128  # outliers
    source = without_labels(bf16(values) if dtype == "bfloat16" else values)
    task = task_of(router, source, names, typical_norm=3.0)
    exact = {"product": exact_product}
    scanned = on_devices(task, names, devices=emulated(**exact), pace=Pace(TILE, 1))
    fold = DeviceFold(task, emulated(seed=seed, **exact)[0])
    tensor = source.values.view(np.uint16) if dtype == "bfloat16" else source.values
    random = np.random.default_rng(seed)
    for piece in np.split(tensor, np.sort(random.choice(np.arange(1, TOKENS), 6, replace=False))):
        fold.take(piece)
    progress = fold.progress()
    assert progress.states["token_counts"]["counts"][-1].sum() > 40
    assert progress.num_tokens == TOKENS
    assert_equal(dataclasses.replace(progress, next_tile=scanned.next_tile), scanned)


def test_progress_counts_what_was_taken_and_what_is_not_finite_as_lost():
    fold, taken = fold_of(reductions=("expert_counts",)), 0
    for tokens in (0, 400, 0, 600):
        fold.take(inputs(1000, 8)[taken : taken + tokens])
        taken += tokens
        progress = fold.progress()
        assert (progress.num_tokens, progress.num_non_finite) == (taken, 0)
        # only what was asked for, and the number of tokens always
        assert set(progress.states) == {"token_counts", "expert_counts"}
        assert progress.states["token_counts"]["counts"][..., 0].sum() == taken
    values = inputs(300, 8)
    values[[5, 299], 2] = np.nan, np.inf
    values[7] = np.float32(3e38) * np.sign(router_of().weight[0])
    progress = folded(values, values[:6])
    assert (progress.num_tokens, progress.num_non_finite) == (306, 4)
    assert progress.states["expert_counts"]["counts"].sum() == 3 * 302


def test_tensors_of_torch_and_in_another_order_are_counted_as_their_rows_are():
    torch = pytest.importorskip("torch")
    values, names = inputs(300, 8), (*COUNTED, *DISTANCES)
    expected = folded(values, reductions=names)
    assert set(expected.states) == set(names)
    for tensor in (torch.from_numpy(values), np.asfortranarray(values)):
        assert_equal(folded(tensor, reductions=names), expected)


def test_memory_grows_with_the_longest_tensor_and_goes_back_with_the_fold():
    device = emulated(product=exact_product)[0]
    fold, used = fold_of(device=device), []
    for tokens in (100, 50, 100, 200, 150):
        fold.take(inputs(tokens, 8))
        used.append(device.used)
    per_token = 4 * 12 + 8  # logits, and a length
    assert np.diff(used).tolist() == [0, 0, 100 * per_token, 0]
    device = emulated(product=exact_product)[0]
    fold = fold_of(device=device)
    fold.take(inputs(300, 8))
    assert any(queue.waiting for queue in device.queues)
    del fold
    assert not any(queue.waiting for queue in device.queues)
    assert device.used == 0


def test_tensors_of_another_shape_or_dtype_are_refused_by_name():
    fold, values = fold_of(), inputs(16, 8)
    axes = (values[:, 0], values.reshape(2, 8, 8))
    for tensor in (inputs(10, 9), values.astype(np.float64), values.astype(np.float16), *axes):
        with pytest.raises(UsageError) as refused:
            fold.take(tensor)
        shape = " x ".join(map(str, tensor.shape))
        assert f"A tensor of {shape} numbers in {tensor.dtype.name}" in str(refused.value)
        assert "router text/0; expected tokens x 8 in bfloat16 or float32." in str(refused.value)
    assert fold.progress().num_tokens == 0


ONLY = {"reductions": ("token_counts",)}
IN_FLOAT64 = router_of(weight=router_of().weight.astype(np.float64))


@pytest.mark.parametrize(
    ("fold", "reason"),
    [
        (
            {"reductions": ("token_counts", "top1", "expert_sets")},
            rf"^A device does not keep expert_sets, top1\.(.|\n)*Known: {', '.join(ON_DEVICE)}\.",
        ),
        ({"router": router_of(1025, 8, 2), **ONLY}, r"text/0 is not routed .* than 1024 experts"),
        ({"router": IN_FLOAT64, **ONLY}, "rows are stored in float64"),
        ({"source": Recorded(inputs(100, 12), "logits"), **ONLY}, "asked for logits"),
        ({"exclude_first": 5}, "without the first 5 of a document"),
        ({"router": CURVED, "reductions": ("distance_histogram",)}, "boundaries are found there"),
    ],
    ids=["not kept", "too many", "float64", "logits", "left out", "curved"],
)
def test_what_devices_do_not_count_is_refused_with_the_reason(fold, reason):
    with pytest.raises(UsageError, match=reason):
        fold_of(**fold)


def test_a_fold_of_a_router_alone_needs_no_recording():
    router, values = router_of(), inputs(700, 8)
    names = ("token_counts", "expert_counts", "distance_histogram")
    fold = device_fold(router, names, emulated(product=exact_product)[0])
    fold.take(values)
    expected = folded(values, reductions=names)
    for name in names[1:]:
        counts = (of.states[name]["counts"] for of in (fold.progress(), expected))
        np.testing.assert_array_equal(*counts)
    with pytest.raises(InternalError, match="handed over"):
        Tensors(router.name).read_values(router.name, 0, 1)
