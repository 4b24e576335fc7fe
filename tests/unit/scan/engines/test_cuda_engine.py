"""The engine of devices gives what the processor's gives, bit for bit where the product does;
inputs that lie on a device are counted alike, and a set of slots is there whole or not at all.

Devices are emulated: the sources of the kernels run on the processor, and queues do their work as
late and in as odd an order as they may.
"""

import dataclasses
import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.errors import InternalError, NonFiniteError, RecordingError, UsageError
from moegeom.core.router import GroupMask
from moegeom.core.tokens import TILE
from moegeom.engine.devices.cuda import SLOTS, DeviceLane, input_reader, product_tokens
from moegeom.engine.devices.device_router import kept_on_device, refusal
from moegeom.engine.devices.resident import DeviceFold, Tensors, device_fold
from moegeom.engine.loop import Hooks, Pace, Progress
from moegeom.engine.request import ComputeOptions
from moegeom.engine.run_facts import token_identity
from moegeom.engine.task import MAX_DOMAINS
from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.tokens.memory import hold
from moegeom.tokens.source import Request
from tests.by_day import by_day
from tests.emulator.emulated_device import EmulatedTensor
from tests.unit.scan.engines.scanned import (
    BY_PROGRAM,
    COUNTED,
    DISTANCES,
    all_tiles,
    assert_equal,
    bf16,
    emulated,
    every_reduction,
    exact_product,
    inputs,
    keeping,
    normal,
    on_devices,
    on_processor,
    product_of_tiles,
    router_of,
    some_choices,
    task_of,
    told_by,
    usual,
    without_labels,
)
from tests.unit.scan.made import Interrupted, Recorded, columns

INF = np.inf


def _bias(experts: int, scale: float = 0.1) -> np.ndarray:
    return normal(experts, seed=7, scale=scale)


def _masked(groups: int, kept: int, score: str, fill: float, rule: str = "sigmoid", **biases):
    return router_of(32, 8, 4, rule, GroupMask(groups, kept, score, fill), **biases)


#: Selection rules, straight, curved and masked.
RULES = {
    "softmax": router_of(64, 8, 8),
    "softmax and logit bias": router_of(12, 8, 3, logit_bias=_bias(12)),
    "identity and both biases": router_of(
        12, 8, 3, "identity", logit_bias=_bias(12), selection_bias=_bias(12, 0.3)
    ),
    "sigmoid + bias": router_of(12, 8, 3, "sigmoid", selection_bias=_bias(12)),
    "sqrt_softplus + bias": router_of(
        12, 8, 3, "sqrt_softplus", logit_bias=_bias(12), selection_bias=_bias(12)
    ),
    "softmax + bias": router_of(12, 8, 3, selection_bias=_bias(12)),
    "groups filled with -inf": _masked(8, 4, "top2_sum", -INF, selection_bias=_bias(32)),
    "groups filled with 0": _masked(8, 4, "max", 0.0, selection_bias=_bias(32, 1.0)),
    "all chosen": router_of(12, 8, 12),
}


#: Arrays of float64 that differ in the last bits: softmax scores are added up in another order.
SUMMED = ("agreement/margin", "input_sample/margin", "beginnings/weights")


def _assert_equal_engines(router, source, **changes) -> Progress:
    names = every_reduction(router, source)
    assert set(COUNTED) - {"ambiguity"} < set(names)
    if source.facts.stage == "router_input":
        changes = {"typical_norm": float(np.sqrt(router.hidden_size))} | changes
    task = task_of(router, source, names, **changes)
    expected = on_processor(task, names, skip_non_finite=True)
    options = {"devices": emulated(2), "pace": Pace(TILE, 2), "skip_non_finite": True}
    progress = on_devices(task, names, **options)
    is_summed = router.rule.score == "softmax" and not router.rule.is_affine
    assert_equal(progress, expected, SUMMED if is_summed else ())
    return progress


def _recorded(router, values, **given) -> Recorded:
    chosen = some_choices(len(values), router.num_experts, router.rule.top_k)
    return Recorded(values, chosen=chosen, **given)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_equal_states(name):
    progress = _assert_equal_engines(RULES[name], _recorded(RULES[name], inputs(1100, 8)))
    assert progress.states["token_counts"]["counts"][..., 0].sum() == 1100


def _with_outliers(tokens: int) -> np.ndarray:
    """Some inputs 128 times as long as the others, some as short, some without length."""
    values = inputs(tokens, 8)
    values[::50] *= 128
    values[7::71] /= 128
    values[3::61] = 0.0
    return values


@pytest.mark.parametrize("exclude_first", [5, 97])
@pytest.mark.parametrize("name", ["softmax and logit bias", "sigmoid + bias"])
def test_outliers_domains_and_left_out_positions_give_equal_states(exclude_first, name):
    source = _recorded(RULES[name], _with_outliers(3000))
    progress = _assert_equal_engines(
        RULES[name], source, options=ComputeOptions(exclude_first=exclude_first)
    )
    counts = progress.states["token_counts"]["counts"][..., 0]
    if exclude_first < 97:  # both domains, no other ones, unlabelled tokens and outliers
        np.testing.assert_array_equal(counts.sum(axis=1) > 0, [True, True, False, True, True])
    assert counts.sum() == (source.columns.position >= exclude_first).sum()


@pytest.mark.parametrize("known", [1, MAX_DOMAINS + 7])
def test_as_many_domains_as_there_are_populations_for_give_equal_states(known):
    domain = np.random.default_rng(3).integers(-1, known, 2100).astype(np.int16)
    names = tuple(map(str, range(known)))
    labels = {"labels": columns(2100, domain), "domains": names}
    source = _recorded(router_of(), _with_outliers(2100), **labels)
    progress = _assert_equal_engines(router_of(), source)
    counts = progress.states["token_counts"]["counts"][..., 0]
    assert len(counts) == min(known, MAX_DOMAINS) + 3
    assert counts[-1].sum() > 50  # outliers have the largest label


@pytest.mark.parametrize("tokens", [1, TILE + 1])
def test_streams_of_any_length_give_equal_states(tokens):
    router = RULES["sigmoid + bias"]
    _assert_equal_engines(router, _recorded(router, inputs(tokens, 8)))


def test_a_stream_may_have_no_labels_and_sums_over_lengths_agree_as_lengths_do():
    _assert_equal_engines(router_of(), without_labels(inputs(9 * TILE, 8)))
    task = task_of(router_of(), Recorded(normal(3000, 8)), ("bf16_flip",))
    counts, expected = (
        scan(task, ("bf16_flip",)).states["bf16_flip"]["counts"]
        for scan in (on_devices, on_processor)
    )
    np.testing.assert_allclose(counts, expected, rtol=1e-4)
    assert counts.sum() > 0


@pytest.mark.parametrize("name", ["identity and both biases", "groups filled with 0"])
def test_recorded_logits_give_equal_states(name):
    router = RULES[name]
    source = _recorded(router, inputs(1100, router.num_experts), stage="logits")
    progress = _assert_equal_engines(router, source)
    assert "ambiguity" not in progress.states  # lengths of inputs are not known


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("count", [1, 2])
def test_inputs_that_lie_on_a_device_are_not_copied_to_it_and_give_the_states_of_those_read(
    count, dtype
):
    router, values = router_of(), _with_outliers(5 * TILE + 7).astype(dtype)
    devices = emulated(count)
    request = Request("router_input", routers=(router.name,))
    source, resident = (
        hold(array).open(request) for array in (values, EmulatedTensor(values, devices[0]))
    )
    names = every_reduction(router, source)
    task, on_device = task_of(router, source, names), task_of(router, resident, names)
    assert token_identity(hold(values)) != token_identity(hold(values + values))
    expected = on_devices(task, names, devices=emulated(count))
    assert_equal(on_devices(on_device, names, devices=devices), expected)
    assert_equal(on_processor(on_device, names), on_processor(task, names))
    assert all(set() < device.compiling <= set(device.launches) for device in devices)
    if count == 1:
        assert devices[0].uploaded_bytes == len(values) * np.dtype(np.uint16).itemsize  # labels


def test_layers_that_lie_on_a_device_are_those_of_an_array_of_the_host():
    (device,) = emulated()
    stack = normal(3, 50, 8)
    names = ("text/0", "text/1", "text/2")
    request = Request("router_input", routers=names)
    layers = [EmulatedTensor(layer, device) for layer in stack]
    by_name = dict(zip(names, layers, strict=True)) | {"document": np.arange(50) // 7}
    for tensors in (layers, EmulatedTensor(stack, device), by_name):
        source = hold(tensors).open(request)
        assert all(device.has(source.tensor(name)) for name in names)
        read = np.stack([source.read_values(name, 3, 41) for name in names])
        np.testing.assert_array_equal(read, stack[:, 3:41])
    assert hold(layers).digest == hold(EmulatedTensor(stack, device)).digest
    assert hold(layers).digest != hold(EmulatedTensor(stack[::-1], device)).digest
    for wrong in (stack.astype(np.float64)[:, :, :0], np.arange(100).reshape(50, 2)):
        with pytest.raises(RecordingError, match="shape|is int64"):
            hold(EmulatedTensor(wrong, device)).open(request)


PACES = (Pace(1, 1), Pace(2 * TILE, 2), Pace(3 * TILE + 7, 2), Pace(10**9, 3))


@pytest.mark.parametrize(
    ("count", "seed", "pace"),
    by_day(
        itertools.product((1, 2, 3), range(3), PACES),
        [*((1, seed, PACES[seed]) for seed in range(3)), (2, 0, PACES[3]), (3, 2, PACES[0])],
    ),
)
def test_the_result_does_not_depend_on_batches_threads_devices_and_turns(count, seed, pace):
    task, names, expected = usual()
    assert_equal(on_devices(task, names, devices=emulated(count, seed), pace=pace), expected)


def test_without_reductions_of_the_host_states_are_equal_and_lost_tokens_named():
    """Without reductions of the host nothing is asked back from the device but lost tokens."""
    task, _, expected = usual()
    names = kept_on_device(task)
    assert set(names) == {*COUNTED, *DISTANCES}
    few = {name: expected.states[name] for name in names}
    progress = on_devices(task, names, devices=emulated(2), pace=Pace(TILE, 2))
    assert_equal(progress, dataclasses.replace(expected, states=few))
    task = task_of(
        router_of(), Recorded(_damaged()), COUNTED, options=ComputeOptions(exclude_first=8)
    )
    progress = on_devices(task, COUNTED, skip_non_finite=True, pace=Pace(TILE, 2))
    assert_equal(progress, on_processor(task, COUNTED, skip_non_finite=True))
    assert progress.num_non_finite == 3
    every = _assert_equal_engines(router_of(), _recorded(router_of(), inputs(2100, 8) * np.nan))
    assert (every.num_non_finite, every.non_finite) == (2100, tuple(range(8)))


@pytest.mark.parametrize("tiles", [[0, 2, 3], [4], []])
def test_tiles_that_are_a_sample_give_equal_states_by_products_of_one_shape(tiles):
    (task, names, _), devices = usual(), emulated(3)
    expected = on_processor(task, names, tiles=tiles)
    assert_equal(on_devices(task, names, tiles=tiles, devices=devices), expected)
    assert expected.num_tokens == sum(min(TILE, 4196 - TILE * tile) for tile in tiles)
    shapes = {shape for device in devices for shape in device.products}
    assert shapes == ({(2 * TILE, 8, 12)} if tiles else set())


def test_a_scan_goes_on_from_any_snapshot_to_equal_states():
    """A snapshot holds what the processor makes of the tiles up to it, and no more."""
    task, names, expected = usual()
    snapshots = []
    pace, hooks = Pace(TILE, 2, snapshot_seconds=-1.0), Hooks(snapshot=snapshots.append)
    scanned = on_devices(task, names, devices=emulated(2), hooks=hooks, pace=pace)
    assert_equal(scanned, expected)
    assert [s.next_tile for s in snapshots] == [1, 2, 3, 4, 5]
    for begin, count in zip(snapshots, (1, 2, 1, 2, 1), strict=True):
        tiles = all_tiles(task.source)[: begin.next_tile]
        assert_equal(begin, on_processor(task, names, tiles=tiles))
        assert_equal(on_devices(task, names, devices=emulated(count, 1), begin=begin), expected)
    assert_equal(on_processor(task, names, begin=snapshots[1]), expected)  # on another engine


def test_rows_reach_the_caller_in_the_order_of_the_tokens_and_stay_as_they_are():
    """What is kept of a batch is not overwritten by later ones."""
    task, names, _ = usual()
    rows, expected, advanced = [], [], []
    fields = ("token", "population", "block", "chosen", "margin", "distance", "pair")
    hooks = Hooks(**keeping(rows, *fields), advanced=advanced.append)
    on_devices(task, names, hooks=hooks, pace=Pace(TILE, 2), devices=emulated(1))
    on_processor(task, names, hooks=Hooks(**keeping(expected, *fields)))
    assert advanced == [TILE] * 4 + [100]
    for field in fields:
        np.testing.assert_array_equal(told_by(rows, field), told_by(expected, field), err_msg=field)
    np.testing.assert_array_equal(told_by(rows, "token"), np.arange(4196))


#: Inputs that are not finite, or that overflow in the product.
BAD = {7: np.nan, TILE - 1: INF, TILE: -INF, 2 * TILE + 5: 3e38}


def _damaged(tokens: int = 3 * TILE) -> np.ndarray:
    values = inputs(tokens, 8)
    for token, value in BAD.items():
        values[token] = np.float32(value) * np.sign(router_of().weight[0])
    return values


def _refusals(task, names, **options) -> set[str]:
    """What the engines say of a token that is not finite."""
    messages = set()
    for scan in (on_processor, on_devices):
        with pytest.raises(NonFiniteError) as refused:
            scan(task, names, **options)
        messages.add(str(refused.value))
    return messages


@pytest.mark.parametrize(
    ("router", "exclude_first"), [(router_of(), 8), (RULES["groups filled with -inf"], 0)]
)
def test_tokens_that_are_not_finite_are_left_out_and_named_alike(router, exclude_first):
    source = _recorded(router, _damaged())
    progress = _assert_equal_engines(
        router, source, options=ComputeOptions(exclude_first=exclude_first)
    )
    if router.num_experts == 12:  # 3e38 was made to overflow at this router
        assert progress.non_finite == tuple(t for t in BAD if t % 97 >= exclude_first)
        assert progress.num_non_finite == 3


@pytest.mark.parametrize("names", [COUNTED, (*COUNTED, *BY_PROGRAM[1:])], ids=["device", "host"])
def test_the_first_token_that_is_not_finite_ends_the_scan_with_the_same_error(names):
    task = task_of(router_of(), Recorded(_damaged()), names)
    (message,) = _refusals(task, names, pace=Pace(TILE, 2))
    assert "2 of 1024 tokens" in message and "first: token 7" in message
    # what another run skipped is refused at once
    assert len(_refusals(task, names, begin=Progress(1, TILE, (7,), 1))) == 1


def test_an_error_leaves_no_work_that_writes_and_a_wrong_width_moves_nothing():
    """The memory goes back to its pools, and whoever gets it next must be the only one to write."""
    source = Recorded(inputs(9 * TILE, 8))
    source.values[2 * TILE] = np.nan
    devices, task = emulated(2), task_of(router_of(), source, COUNTED)
    with pytest.raises(NonFiniteError):
        on_devices(task, COUNTED, devices=devices, pace=Pace(TILE, 2))
    assert not any(queue.waiting for device in devices for queue in device.queues)
    devices = emulated()
    task = task_of(router_of(), Recorded(inputs(300, 9)), COUNTED)
    with pytest.raises(RecordingError, match="has 9 values a token; the checkpoint expects 8"):
        on_devices(task, COUNTED, devices=devices)
    assert devices[0].used == 0


def test_errors_of_the_source_and_of_the_caller_come_out_as_they_are():
    def interrupt(_: object) -> None:
        raise Interrupted

    task, names, _ = usual()
    for place in ("advanced", "rows", "written", "snapshot"):
        hooks = Hooks(**{place: interrupt})
        with pytest.raises(Interrupted):
            on_devices(task, names, hooks=hooks, pace=Pace(TILE, 2, snapshot_seconds=-1.0))
    source = Recorded(inputs(9 * TILE, 8))
    read = source.read_values
    source.read_values = lambda name, start, stop: (  # the first row is read, to see that it fits
        read(name, start, stop) if start < 4 * TILE else interrupt(None)
    )
    with pytest.raises(Interrupted):
        on_devices(task_of(router_of(), source, COUNTED), COUNTED, pace=Pace(TILE, 2))


@pytest.mark.parametrize("names", [COUNTED, (*COUNTED, "neighbours")])
def test_the_next_batch_is_read_while_others_are_on_their_way(names):
    """The bus must not stand still while files are read and batches are folded."""
    devices = emulated(product=exact_product)
    source, at_work = Recorded(inputs(8 * TILE, 8)), []

    def read(router: str, start: int, stop: int) -> np.ndarray:
        at_work.append(sum(bool(queue.waiting) for queue in devices[0].queues))
        return source.values[start:stop]

    source.read_values = read
    on_devices(task_of(router_of(), source, names), names, devices=devices)
    assert max(at_work) >= 1


def test_inputs_in_bfloat16_are_moved_in_half_the_bytes():
    values, labels = inputs(2100, 8), 2 * 2100
    for stored in (values, bf16(values)):
        (device,) = devices = emulated()
        on_devices(task_of(router_of(), Recorded(stored), COUNTED), COUNTED, devices=devices)
        assert device.uploaded_bytes - labels == stored.nbytes


@pytest.mark.parametrize(("is_short", "columns"), [(True, 12), (False, 36)])
def test_rows_that_bfloat16_holds_take_one_product_and_others_three(is_short, columns):
    weight = router_of().weight
    if is_short:
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    device = emulated(product=exact_product)[0]
    task = task_of(router_of(weight=weight), Recorded(bf16(inputs(1500, 8))), COUNTED)
    progress, margins = on_devices(task, COUNTED, devices=[device]), ("margin", "effective_margin")
    rounded = tuple(f"{name}_histogram/counts" for name in margins)
    assert_equal(progress, on_processor(task, COUNTED), rounded)
    assert set(device.products) == {(2 * TILE, 8, columns)}


@pytest.mark.parametrize("product", [product_of_tiles, exact_product], ids=["float32", "float64"])
def test_choices_for_inputs_in_bfloat16_are_those_of_exact_products_but_for_near_ties(product):
    router, values = router_of(64, 32, 8, logit_bias=_bias(64)), bf16(normal(2000, 32))
    rows, names = [], ("ambiguity", "distance_histogram")
    hooks = Hooks(**keeping(rows, "chosen", "margin", "float_bound"))
    task = task_of(router, Recorded(values), names)
    on_devices(task, names, hooks=hooks, devices=emulated(product=product))
    weight, bias = router.weight.astype(np.float64), router.logit_bias.astype(np.float64)
    logits = values.astype(np.float64) @ weight.T + bias
    order = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    chosen, margin, bound = (told_by(rows, name) for name in ("chosen", "margin", "float_bound"))
    is_clear = margin > bound
    assert is_clear.mean() > 0.99
    np.testing.assert_array_equal(np.sort(chosen)[is_clear], np.sort(order)[is_clear])
    last = np.sort(-logits, axis=1)
    np.testing.assert_array_less(np.abs(margin - (last[:, 8] - last[:, 7])), bound)


@functools.cache
def _room(tokens: int) -> int:
    """Bytes of device memory that a scan with batches of so many tokens takes."""
    task, names, _ = usual()
    device = emulated()[0]
    used: list[int] = []
    hooks = Hooks(advanced=lambda _: used.append(device.used))
    on_devices(task, names, devices=[device], pace=Pace(tokens, 2), hooks=hooks)
    assert len(set(used)) == 1  # nothing is allocated while batches go round
    assert device.used == 0  # all memory is given back
    return used[0]


def test_a_batch_is_halved_until_it_fits_the_device_with_the_least_memory():
    """What a failed attempt took is given back: the room is just enough for one that fits."""
    task, names, expected = usual()
    for fits, halved in ((2 * TILE, [4096]), (TILE, [4096, 2048])):
        lines: list[str] = []
        device = emulated(room=_room(fits))[0]
        pace = Pace(4 * TILE, 2)
        progress = on_devices(task, names, devices=[device], pace=pace, on_message=lines.append)
        assert_equal(progress, expected)
        assert lines == [
            f"the device has no room for {tokens} tokens at once; taking {tokens // 2}"
            for tokens in halved
        ]
        assert {shape[0] for shape in device.products} == {fits}
    task, names, expected = usual()
    devices = [*emulated(1), *emulated(1, 1, room=_room(TILE))]
    assert_equal(on_devices(task, names, devices=devices, pace=Pace(2 * TILE, 2)), expected)
    assert {shape[0] for device in devices for shape in device.products} == {TILE}
    task, names, _ = usual()
    for room in (0, 1000, _room(TILE) - 1):
        device = emulated(room=room)[0]
        with pytest.raises(OutOfDeviceMemory):
            on_devices(task, names, devices=[device])


def test_distances_to_curved_boundaries_are_not_asked_of_a_device():
    for names in (("distance_histogram",), ("token_counts", "relative_distance_histogram")):
        task = task_of(RULES["sigmoid + bias"], Recorded(inputs(1100, 8)), names)
        assert "boundaries are found there" in refusal(task)
        with pytest.raises(UsageError, match="boundaries are found there"):
            on_devices(task, names)


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
    ("router", "dtype", "seed", "folds"),
    [
        (router_of(), "float32", 0, False),
        (CURVED, "bfloat16", 1, False),
        (router_of(), "bfloat16", 2, True),
        (CURVED, "float32", 3, True),
    ],
)
def test_tensors_cut_anywhere_give_the_states_of_a_scan(router, dtype, seed, folds):
    values = inputs(TOKENS, 8)
    values[::60] *= 128  # outliers
    source = without_labels(bf16(values) if dtype == "bfloat16" else values)
    names = every_reduction(router, source) if folds else COUNTED
    task = task_of(router, source, names, typical_norm=3.0)
    exact = {"product": exact_product}
    scanned = on_devices(task, names, devices=emulated(**exact), pace=Pace(TILE, 1))
    fold = DeviceFold(task, emulated(seed=seed, **exact)[0], block_tokens=1500)
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
            {"reductions": ("token_counts", "directions")},
            r"text/0 is not routed on a device: directions look at what a device does not",
        ),
        ({"router": router_of(1025, 8, 2), **ONLY}, r"text/0 is not routed .* than 1024 experts"),
        ({"router": IN_FLOAT64, **ONLY}, "rows are stored in float64"),
        ({"source": Recorded(inputs(100, 12), "logits"), **ONLY}, "asked for logits"),
        ({"options": ComputeOptions(exclude_first=5)}, "without the first 5 of a document"),
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


def lane_of(device, tokens: int, names: tuple[str, ...]) -> DeviceLane:
    task = task_of(router_of(), Recorded(inputs(100, 8)), names)
    return DeviceLane(task, device, input_reader(task), tokens, 4, with_rows=False)


@pytest.mark.parametrize("names", [COUNTED, (*COUNTED, "neighbours")])
def test_slots_of_a_device_share_nothing_and_counters_begin_at_zero(names):
    device = emulated()[0]
    lane = lane_of(device, TILE, names)
    assert len(lane.slots) == SLOTS
    for name in ("queue", "values", "label", "device_values", "device_label"):
        assert len({id(getattr(slot, name)) for slot in lane.slots}) == SLOTS
    for name in COUNTED:  # in memory that does not
        counts = device.get(getattr(lane.reduced.counters, name))
        assert counts.dtype == np.uint64 and not counts.any()
    one_tile = device.used
    del lane
    assert device.used == 0
    lane = lane_of(device, 2 * TILE, names)
    assert lane and one_tile < device.used < 2 * one_tile
