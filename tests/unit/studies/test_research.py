"""``capacity``, ``continuity``, ``regions``, ``outputs`` and ``attention``: on sizes, samples and
small files. Oracle of outputs: transformers runs the blocks of the samples on the inputs that
are recorded.
"""

import contextlib
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, RouterError, UsageError
from moegeom.core.tokens import TILE
from moegeom.engine.jumps import ExactRouter, why_no_jumps
from moegeom.geometry.capacity import expected_diagram, most_regions
from moegeom.geometry.gram import cosines, gram_score
from moegeom.geometry.space import mean_energy_share, mean_energy_share_error
from moegeom.research.attention.document import attention_figures, document
from moegeom.research.outputs import study as outputs_study
from moegeom.research.outputs.document import _figure, outputs_figures
from moegeom.router.attention.tensors import attention_families, load_attention_family
from moegeom.router.expert_functions import ExpertFunctions
from moegeom.router.load import load_routers
from moegeom.studies.opened import Checkpoint
from moegeom.tokens.sources.recorded import open_recording
from tests.unit.studies import orthonormal
from tests.unit.studies.samples import BALANCED, GROUPED, few_tokens, sides, unwrapped, worded

CKPT, REC = sides(BALANCED)
SIZES = {"experts": 16, "top_k": 4, "width": 20, "hidden": 64}


def layer_of(*sources, **options):
    (layer,) = mg.capacity(*sources, **options).value.layers
    return layer


def size_of(model: Path, pattern: str) -> int:
    tensors = load_file(model / "model.safetensors")
    return sum(t.size for name, t in tensors.items() if re.search(pattern, name))


def test_sizes_give_the_counts_of_the_formulas_the_whole_input_last():
    layer = layer_of(**SIZES, data_dims=(1, 2), splits=(1, 2))
    assert [at.most_cells for at in layer.at] == [107, 653]
    assert layer.num_sets == 1820
    plane = layer.at[1]
    assert (plane.published.dense, plane.published.top_1) == (3241, 3376)
    assert plane.exceeds
    assert plane.expected_cells == expected_diagram(16, 4, 2, is_central=False).cells
    assert [(split.split, split.width) for split in layer.splits] == [(1, 20), (2, 10)]
    assert [gain.cells for gain in layer.splits[0].gains] == [0.0, 0.0]
    layer = layer_of(**SIZES)
    assert [at.dims for at in layer.at] == [1, 2, 5, 10, 20, 50, 64]
    assert [split.split for split in layer.splits] == [1, 2, 4]
    assert layer.at[-1].expected_cells == math.comb(16, 4)
    report = mg.capacity(**SIZES | {"top_k": 1})
    (layer,) = report.value.layers
    assert not any(at.exceeds for at in layer.at)
    assert "impossible" not in report.text(100)


def test_a_checkpoint_says_its_sizes_and_no_byte_of_an_expert_is_read():
    opened = Checkpoint(str(CKPT))
    record = mg.capacity(opened).value
    (layer,) = record.layers
    sizes = layer.sizes
    assert (sizes.num_experts, sizes.top_k, sizes.width, sizes.hidden) == (16, 4, 32, 64)
    assert (sizes.is_gated, sizes.shared_width, layer.routers) == (True, 0, "text/0-2")
    assert "'intermediate_size'" in layer.width_origin
    assert "down_proj" in layer.width_origin
    assert record.run["checkpoint"]["bytes_read"] == opened.found.bytes_read
    assert layer.parameters.total == size_of(CKPT, r"layers\.1\.mlp\.(exp|gate)")
    report = mg.capacity(GROUPED / "step_1500")
    (layer,) = report.value.layers
    assert (layer.sizes.width, layer.sizes.shared_width, layer.is_linear) == (16, 16, False)
    assert "not linear" in report.text(100)
    names = r"layers\.1\.mlp\.(experts|shared_experts|gate)\..*weight"
    assert layer.parameters.total == size_of(GROUPED / "step_1500", names)


def test_tokens_say_on_how_many_dimensions_they_lie():
    tokens = few_tokens(BALANCED.name)
    layer = layer_of(CKPT, tokens, layers=0)
    scanned = mg.scan(CKPT, tokens, layers=0).layers()
    ends = [scanned[f"intrinsic_dimension_{end}"][0].as_py() for end in ("low", "high")]
    assert [at.dims for at in layer.at] == [*(math.ceil(end) for end in ends), 64]
    assert layer.dims_origin.startswith("intrinsic dimension of the tokens")
    one = layer_of(CKPT, tokens, layers=0, data_dims=3)
    assert [at.dims for at in one.at] == [3]


def test_the_record_has_logarithms_of_counts_of_any_length():
    report = mg.capacity(experts=64, top_k=8, width=1024, hidden=2048, gated=True)
    (layer,) = json.loads(report.json())["layers"]
    whole = layer["at"][-1]
    assert (whole["dims"], whole["published_log10"]["dense"] > 1900) == (2048, True)
    for at, own in zip(layer["at"], report.value.layers[0].at, strict=True):
        np.testing.assert_allclose(at["most_cells_log10"], math.log10(own.most_cells), rtol=1e-12)
    np.testing.assert_allclose(layer["num_sets_log10"], math.log10(math.comb(64, 8)), rtol=1e-12)


def test_tokens_without_inputs_are_refused():
    logits = np.random.default_rng(0).standard_normal((3, 200, 16))
    with pytest.raises(mg.MoeGeomError, match="that takes router inputs") as caught:
        mg.capacity(CKPT, mg.recording(logits, stage="logits"))
    assert caught.value.exit_code == 3


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(CKPT, tmp_path / "model")


def rewrite(model: Path, **settings) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    left = {key: value for key, value in (config | settings).items() if value is not None}
    (model / "config.json").write_text(json.dumps(left), "utf-8")


def test_the_width_is_that_of_config_and_shapes_and_must_be_typed_without_both(copied):
    rewrite(copied, intermediate_size=48)
    with pytest.raises(mg.MoeGeomError) as caught:
        mg.capacity(copied)
    assert caught.value.exit_code == 3
    assert "'intermediate_size' says experts of 48 neurons" in caught.value.message
    assert "down_proj.weight has 32 beside inputs of 64" in caught.value.message
    assert layer_of(copied, width=32).sizes.width == 32
    with pytest.raises(mg.MoeGeomError, match="width says experts of 48"):
        mg.capacity(copied, width=48)
    rewrite(copied, intermediate_size=None)
    assert layer_of(copied).width_origin.startswith("shape of model.layers.0.mlp.experts.0.down")
    tensors = load_file(copied / "model.safetensors")
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    save_file(rest, copied / "model.safetensors")
    with pytest.raises(mg.MoeGeomError) as caught:
        mg.capacity(copied)
    assert caught.value.exit_code == 3
    assert "width N" in caught.value.hint
    layer = layer_of(copied, width=32, gated=True)
    assert (layer.sizes.width, layer.sizes.is_gated) == (32, True)
    assert "no tensor of an expert" in layer.width_origin


FUSED = {
    "gate_up": ("experts.gate_up_proj", "experts.down_proj"),
    "linear": ("input_linear.weight", "output_linear.weight"),
}


@pytest.mark.parametrize("names", FUSED)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_tensor_are_as_wide(copied, names, is_transposed):
    tensors = load_file(copied / "model.safetensors")
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp."

        def every(leaf: str, at: str = at) -> np.ndarray:
            return np.stack([tensors[f"{at}experts.{e}.{leaf}_proj.weight"] for e in range(16)])

        both = np.concatenate([every("gate"), every("up")], axis=1)
        turned = both.swapaxes(1, 2) if is_transposed else both
        fused, down = FUSED[names]
        rest |= {at + fused: np.ascontiguousarray(turned), at + down: every("down")}
    save_file(rest, copied / "model.safetensors")
    layer = layer_of(copied)
    assert (layer.sizes.width, layer.sizes.is_gated) == (32, True)


def test_layers_of_other_sizes_are_told_apart(copied):
    """A layer whose experts are narrower, as a list in the config says."""
    tensors = load_file(copied / "model.safetensors")
    for name in list(tensors):
        if ".layers.2.mlp.experts." in name:
            part = tensors[name][:, :16] if "down" in name else tensors[name][:16]
            tensors[name] = np.ascontiguousarray(part)
    save_file(tensors, copied / "model.safetensors")
    rewrite(copied, intermediate_size=[32, 32, 16])
    layers = mg.capacity(copied).value.layers
    sizes = [(one.routers, one.sizes.width) for one in layers]
    assert sizes == [("text/0-1", 32), ("text/2", 16)]


@pytest.fixture(scope="module")
def found():
    return mg.continuity(CKPT, REC, layers=1).value


def stored(name: str) -> torch.Tensor:
    found = load_file(CKPT / "model.safetensors")[f"model.layers.1.mlp.{name}.weight"]
    return torch.from_numpy(found.astype(np.float64))


def block(y: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    x, out = torch.from_numpy(y), torch.zeros(y.shape, dtype=torch.float64)
    share = (x @ stored("gate").T).softmax(-1)
    experts = share.topk(4, dim=-1).indices if chosen is None else torch.from_numpy(chosen).long()
    for e in experts.unique().tolist():
        gate, up, down = (stored(f"experts.{e}.{part}_proj") for part in ("gate", "up", "down"))
        row = (experts == e).any(-1)
        inner = torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T)
        out[row] += share[row, e, None] * (inner @ down.T)
    return out.numpy()


def inputs_of(recording: Path) -> np.ndarray:
    found = load_file(recording / "router_input-text.1-00000.safetensors")
    return next(iter(found.values())).astype(np.float64)


def line_of(crossing) -> tuple[np.ndarray, np.ndarray]:
    rows, y = stored("gate").numpy(), inputs_of(REC)[crossing.token]
    apart = rows[crossing.pair[0]] - rows[crossing.pair[1]]
    return y - (apart @ y) / (apart @ apart) * apart, apart / np.linalg.norm(apart)


def test_the_line_has_the_outputs_of_the_block_in_torch_and_meets_no_other_boundary(found):
    crossing = found.routers[0].crossing
    point, normal = line_of(crossing)
    some = np.arange(0, len(crossing.offset), 29)
    outputs = block(point + crossing.offset[some, None] * normal)
    np.testing.assert_allclose(crossing.hard.line[some], outputs[:, crossing.coordinate], rtol=1e-6)
    step = 1e-7 * np.array([[1.0], [-1.0]]) * normal
    np.testing.assert_allclose(
        np.linalg.norm(np.subtract(*block(point + step))), crossing.jump, rtol=1e-4
    )
    # At 4,001 points on either side the block chooses one set.
    for sign in (1.0, -1.0):
        at = sign * crossing.radius[-1] * np.linspace(1e-6, 1.0, 4001)[:, None]
        logits = torch.from_numpy(point + at * normal) @ stored("gate").T
        chosen = np.sort(logits.topk(4, dim=-1).indices.numpy(), axis=1)
        assert (chosen == chosen[0]).all()


def test_hard_outputs_level_off_at_the_jump_and_of_the_tokens_tried_the_highest_wins(found):
    crossing = found.routers[0].crossing
    hard, smooth = crossing.hard, crossing.smooth
    np.testing.assert_allclose(hard.spread[0], crossing.jump, rtol=1e-3)
    assert abs(hard.slope_near) < 0.01
    assert abs(smooth.slope_near - 1.0) < 0.01
    ratio = smooth.spread / crossing.radius
    assert ratio.max() == smooth.steepest < 2.0 * ratio.min()
    assert smooth.spread[0] < 1e-3 * crossing.jump
    one = found.routers[0]
    assert (one.num_tokens, one.num_known) == (2000, 2000)
    jumps = {}
    for token in (one.crossing.token, 3, 500, 1001):
        with contextlib.suppress(UsageError):  # its line meets another boundary
            alone = mg.continuity(CKPT, REC, layers=1, at=token).value.routers[0]
            jumps[token] = alone.crossing.jump
    np.testing.assert_allclose(jumps.pop(one.crossing.token), one.crossing.jump)
    assert max(jumps.values()) < one.crossing.jump


def test_a_grouped_rule_is_smoothed_where_the_boundary_is_that_of_two_experts():
    found = mg.continuity(*sides(GROUPED), layers=2)
    one = found.value.routers[0]
    assert one.has_groups
    assert 0 < one.num_known < one.num_tokens
    assert abs(one.crossing.hard.slope_near) < 0.01
    assert abs(one.crossing.smooth.slope_near - 1.0) < 0.02
    assert "boundary points unknown" in " ".join(str(found).split())


def test_the_file_has_lines_and_spreads_of_both_gates(tmp_path):
    out = tmp_path / "lines.parquet"
    found = mg.continuity(CKPT, REC, layers=0, out=out, smooth="eps=0.2").value.routers[0]
    table = pq.read_table(out).to_pylist()
    spreads = [r for r in table if (r["what"], r["gate"]) == ("spread", "smooth")]
    np.testing.assert_allclose([r["spread"] for r in spreads], found.crossing.smooth.spread)
    assert len(spreads) == 40
    assert {r["gate"] for r in table if r["what"] == "line"} == {"hard", "smooth"}
    assert found.eps == 0.2


def test_a_flip_costs_what_the_other_experts_make_of_the_input_and_none_nothing():
    """B is an earlier checkpoint's recording: its choices, by A's experts, in torch."""
    other = sides(BALANCED, 1000)[1]
    found = mg.explain(CKPT, REC, run_b=other, layers=1, experts=True)
    (cost,) = found.value.costs
    assert "change the output of the routed experts" in " ".join(str(found).split())
    mine, theirs = (
        next(iter(load_file(folder / "chosen-text.1-00000.safetensors").values())).astype(np.int64)
        for folder in (REC, other)
    )
    flipped = np.flatnonzero((np.sort(mine, axis=1) != np.sort(theirs, axis=1)).any(axis=1))
    assert (cost.num_flipped, cost.num_looked) == (len(flipped), 512)
    some = flipped[np.linspace(0, len(flipped) - 1, 512).astype(int)]
    y = inputs_of(REC)[some]
    one, another = block(y, mine[some]), block(y, theirs[some])
    over = np.linalg.norm(one - another, axis=1) / np.linalg.norm(one, axis=1)
    np.testing.assert_allclose(cost.over_output, over.mean(), rtol=1e-6)
    found = mg.explain(CKPT, REC, run_b=REC, layers=1, experts=True)
    (cost,) = found.value.costs
    assert (cost.num_flipped, cost.over_output) == (0, None)


WAYS = 2


@pytest.fixture(scope="module")
def crossed():
    return mg.regions(
        CKPT, REC, layers=1, segments=WAYS, random_experts=1,
        against=BALANCED / "step_100",
    ).value  # fmt: skip


def test_changes_on_ways_are_those_of_many_points_on_them(crossed):
    """Both kinds of changes, at 20,001 points of each way between the same pairs."""
    stored = {n: v.astype(np.float64) for n, v in load_file(CKPT / "model.safetensors").items()}
    inputs = load_file(REC / "router_input-text.1-00000.safetensors")
    y = next(iter(inputs.values())).astype(np.float64)
    assert len(y) <= 20 * TILE
    at = "model.layers.1.mlp."
    gates = np.stack([stored[f"{at}experts.{e}.gate_proj.weight"] for e in range(16)])
    chosen = np.random.default_rng(0).permutation(len(y))[: 2 * WAYS]
    t = np.linspace(0.0, 1.0, 20_001)[:, None]
    routed, neurons, every = [], [], []
    for a, b in zip(y[chosen[:WAYS]], y[chosen[WAYS:]], strict=True):
        points = (1.0 - t) * a + t * b
        logits = points @ stored[f"{at}gate.weight"].T
        is_chosen = logits >= np.sort(logits, axis=1)[:, [-4]]
        routed.append((np.diff(is_chosen, axis=0).any(axis=1)).sum())
        signs = np.einsum("td,end->ten", points, gates) > 0.0
        changed = np.diff(signs, axis=0)
        every.append(changed.sum())
        neurons.append((changed & is_chosen[:-1, :, None]).sum())
    way = crossed.routers[0].ways[0]
    assert way.num_segments == WAYS
    assert way.router_changes == np.mean(routed)
    assert way.all_neurons == np.mean(every)
    np.testing.assert_allclose(way.neuron_changes, np.mean(neurons), atol=2 / WAYS)
    np.testing.assert_allclose(way.regions, 1 + way.router_changes + way.neuron_changes)


def test_a_grouped_rule_changes_on_ways_as_it_does_at_many_points():
    """And its cells are no polygons."""
    report = mg.regions(*sides(GROUPED), layers=1, segments=8, random_experts=0)
    (one,) = report.value.routers
    assert one.plane is None
    assert "No plane" in str(report)
    routers = load_routers(open_checkpoint(GROUPED / "step_1500")).routers
    (router,) = (r for r in routers if r.layer == 1)
    recording = open_recording(sides(GROUPED)[1])
    inputs = recording.read_values(router.name, 0, recording.facts.num_tokens).astype(np.float64)
    chosen = np.random.default_rng(0).permutation(len(inputs))[:16]
    changes = []
    for a, b in zip(inputs[chosen[:8]], inputs[chosen[8:]], strict=True):
        t = np.linspace(0.0, 1.0, 20_001)[:, None]
        exact = ExactRouter(router)
        sets = np.sort(exact.chosen(exact.logits((1.0 - t) * a + t * b)), axis=1)
        changes.append((np.diff(sets, axis=0) != 0).any(axis=1).sum())
    way = one.ways[0]
    assert way.router_changes == pytest.approx(np.mean(changes), abs=1 / 8)
    assert way.unknown_share < 0.2


def test_where_every_expert_is_chosen_or_all_rows_are_equal_no_jump_is_looked_for():
    router = orthonormal.router_of()
    facts = orthonormal.source_of(orthonormal.inputs_of(1)).facts
    every = dataclasses.replace(router, rule=dataclasses.replace(router.rule, top_k=16))
    assert why_no_jumps(every, facts) == "every expert is chosen: there is no boundary"
    equal = dataclasses.replace(router, weight=np.ones_like(router.weight))
    assert why_no_jumps(equal, facts).startswith("all rows are equal")


def test_regions_of_a_plane_stay_below_the_bound_and_ways_are_drawn_by_the_seed(crossed):
    for one in (crossed.routers[0], crossed.routers[0].before):
        plane = one.plane
        assert plane.bound == most_regions(16, 4, 32, 2)
        assert all(0 < count <= plane.bound for count in (plane.regions, *plane.random))
        assert len(set(plane.expert_sets)) == len(plane.of_cell)

    def ways(seed: int) -> tuple:
        asked = {"layers": 1, "segments": WAYS, "random_experts": 0}
        return mg.regions(CKPT, REC, seed=seed, **asked).value.routers[0].ways

    assert ways(0) == crossed.routers[0].ways
    assert ways(1) != ways(0)


def test_the_table_has_every_way_and_every_cell(tmp_path):
    out = tmp_path / "regions.parquet"
    asked = {"layers": 0, "segments": 5, "random_experts": 0, "out": out}
    router = mg.regions(CKPT, REC, **asked).value.routers[0]
    rows = pq.read_table(out).to_pylist()
    cells = [row for row in rows if row["way"] == "plane"]
    assert [tuple(row["cell"]) for row in cells] == list(router.plane.expert_sets)
    assert sum(row["regions"] for row in cells) == router.plane.regions
    assert len(rows) == len(cells) + 2


def test_what_is_too_much_curved_or_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    asked = {"layers": 0, "segments": 4, "random_experts": 0}
    with pytest.raises(UsageError, match="of experts are to be read"):
        mg.regions(CKPT, REC, **asked)
    with pytest.raises(UsageError, match="197 kB of experts are, at most, to be read"):
        mg.continuity(CKPT, REC, layers=1)
    assert mg.regions(CKPT, REC, yes=True, **asked).value.routers
    with pytest.raises(RouterError, match="no router text/1"):
        mg.regions(CKPT, REC, layers=1, against=GROUPED / "step_1500")


def sample_of(ckpt: Path, tokens: Path, **options: Any) -> Any:
    return mg.outputs(ckpt, tokens, **({"sample": 200, "seed": 5} | options)).value


def test_an_expert_is_applied_once_to_all_of_its_tokens(monkeypatch):
    apply, tokens = ExpertFunctions.apply, {}

    def counted(self, expert: int, inputs: np.ndarray) -> np.ndarray:
        assert expert not in tokens
        tokens[expert] = len(inputs)
        return apply(self, expert, inputs)

    monkeypatch.setattr(ExpertFunctions, "apply", counted)
    (router,) = sample_of(*sides(BALANCED), layers=1).routers
    assert tokens == {one.expert: one.num_tokens for one in router.chosen}


def test_of_wide_experts_fewer_tokens_are_computed_unless_their_number_is_asked_for(monkeypatch):
    whole = mg.outputs(*sides(BALANCED), layers=1).value
    (layer,) = whole.routers
    assert (whole.num_tokens, layer.num_tokens) == (512, 512)
    used = sum(one.num_tokens > 0 for one in layer.experts)
    at_512 = 3 * 64 * 32 * (512 * layer.top_k + outputs_study._READING * used)
    for products, number in ((at_512, 512), (at_512 - 1, 256), (1, 32)):
        monkeypatch.setattr(outputs_study, "_PRODUCTS", products)
        few = mg.outputs(*sides(BALANCED), layers=1)
        assert few.value.num_tokens == number
        assert f"sample {number:,} of" in " ".join(few.text().split())
        assert sample_of(*sides(BALANCED), layers=1).num_tokens == 200
    (small,), error = few.value.routers, layer.errors
    assert abs(small.overlap - layer.overlap) < 4.0 * small.errors[1]
    assert error[1] < small.errors[1] < 16.0 * error[1]


def test_the_error_of_the_share_in_the_mean_is_that_of_leaving_out_one_token_at_a_time():
    random = np.random.default_rng(5)
    values = random.standard_normal((40, 6)) + 0.5
    without = [mean_energy_share(np.delete(values, token, axis=0)) for token in range(40)]
    error = np.sqrt(39.0 / 40.0 * np.sum((without - np.mean(without)) ** 2))
    assert mean_energy_share_error(values) == pytest.approx(error, rel=1e-10)
    drawn = [mean_energy_share(random.standard_normal((40, 6)) + 0.5) for _ in range(400)]
    assert error == pytest.approx(np.std(drawn), rel=0.5)
    assert np.isnan(mean_energy_share_error(values[:1]))
    assert np.isnan(mean_energy_share_error(0.0 * values))


@pytest.fixture(scope="module", params=[BALANCED, GROUPED], ids=lambda path: path.name)
def written(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple:
    out = tmp_path_factory.mktemp("outputs") / "rec"
    record = sample_of(*sides(request.param), every_expert=True, out=out)
    return request.param, record, open_recording(out), out


def of_model(block: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        total = block(inputs[None])[0]
        has_shared = hasattr(block, "shared_experts")
        shared = block.shared_experts(inputs) if has_shared else torch.zeros_like(inputs)
        ones = torch.ones(len(inputs), 1)
        every = [
            block.experts(inputs, torch.full((len(inputs), 1), e), ones)
            for e in range(block.experts.num_experts)
        ]
    routed = total - shared
    return {
        "shared_output": shared,
        "routed_output": routed,
        "expert_output": torch.stack(every, 1),
    }


def test_the_recording_holds_what_the_blocks_give(written):
    path, record, source, _ = written
    model = transformers.AutoModelForCausalLM.from_pretrained(sides(path)[0], dtype=torch.float32)
    assert source.facts.outputs == ("shared_output", "routed_output", "expert_output")
    assert source.facts.num_tokens == record.num_tokens == 200
    for router in record.routers:
        layer = int(router.router.rpartition("/")[2])
        inputs = torch.tensor(source.read_values(router.router, 0, 200))
        for kind, expected in of_model(model.eval().model.layers[layer].mlp, inputs).items():
            mine = source.read_output(router.router, kind, 0, 200)
            scale = max(float(expected.abs().max()), 1e-30)
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5 * scale, err_msg=kind)


def test_tokens_are_those_of_the_recording_that_was_read(written):
    path, record, source, _ = written
    whole = open_recording(sides(path)[1])
    router, total = record.routers[0].router, whole.facts.num_tokens
    every, own = whole.read_columns(0, total), source.read_columns(0, 200)
    place = {
        key: row
        for row, key in enumerate(
            zip(every.document.tolist(), every.position.tolist(), strict=True)
        )
    }
    rows = [place[key] for key in zip(own.document.tolist(), own.position.tolist(), strict=True)]
    for part, values in vars(every.at(np.array(rows))).items():
        np.testing.assert_array_equal(getattr(own, part), values)
    inputs = whole.read_values(router, 0, total)
    np.testing.assert_array_equal(source.read_values(router, 0, 200), inputs[rows])
    chosen = whole.read_chosen(router, 0, total)
    assert chosen is not None
    np.testing.assert_array_equal(source.read_chosen(router, 0, 200), chosen[rows])


def test_a_scan_of_it_has_the_same_figures(written):
    path, record, _, out = written
    router = record.routers[-1]
    layer = int(router.router.rpartition("/")[2])
    (row,) = mg.scan(sides(path)[0], out, layers=layer).layers().to_pylist()
    assert row["routed_mean_energy_share"] == pytest.approx(router.routed_mean_share, 1e-5)
    assert row["overlap_output"] == pytest.approx(router.overlap_every, 1e-4, 1e-7)
    if router.shared == "computed":
        assert row["shared_mean_energy_share"] == pytest.approx(router.shared_mean_share, 1e-5)
        assert row["shared_energy_share"] == pytest.approx(router.shared_energy_share, 1e-5)
    else:
        assert row["shared_energy_share"] == 0.0


def test_experts_share_the_tokens_and_the_energy_and_the_chosen_alone_give_the_output(written):
    _, record, _, _ = written
    for router in record.routers:
        assert sum(one.num_tokens for one in router.experts) == record.num_tokens * router.top_k
        assert sum(one.energy_share for one in router.experts) == pytest.approx(1.0)
        assert 0.0 < router.adds_up <= 1.0
        assert router.num_read == router.num_experts == len(router.experts)
    path, record, _, _ = written
    few = sample_of(*sides(path))
    for one, both in zip(few.routers, record.routers, strict=True):
        assert one.routed_norm == pytest.approx(both.routed_norm, 1e-6)
        assert one.overlap == pytest.approx(both.overlap, 1e-5)
        assert one.overlap_every is None
        assert one.num_read <= both.num_read


def test_a_cosine_of_nothing_has_no_sign():
    assert [_figure(value) for value in (-0.001, 0.0, -0.006, None)] == [
        "0.00",
        "0.00",
        "-0.01",
        "-",
    ]


def test_a_table_has_a_row_for_each_expert_and_the_figure_their_shares(tmp_path):
    file = tmp_path / "experts.parquet"
    record = mg.outputs(*sides(BALANCED), layers=[0, 1], sample=50, out=file).value
    experts = [one for router in record.routers for one in router.experts]
    rows, (figure,) = pq.read_table(file).to_pylist(), outputs_figures(record)
    assert [row["expert"] for row in rows] == 2 * [*range(16)]
    assert [r["contribution_norm"] for r in rows] == [one.contribution_norm for one in experts]
    columns = {name: list(values) for name, values in figure.columns}
    assert columns["energy_share"] == [one.energy_share for one in experts]
    assert sum(columns["num_tokens"]) == 2 * 50 * 4


def test_tokens_that_are_not_finite_somewhere_are_left_out_everywhere():
    ckpt, rec = sides(BALANCED)
    whole = open_recording(rec)
    arrays = {name: whole.read_values(name, 0, 60).copy() for name in whole.facts.routers}
    arrays["text/1"][7] = np.nan
    record = mg.outputs(ckpt, mg.recording(arrays, stage="router_input"), non_finite="skip").value
    assert (record.num_tokens, record.sample.num_non_finite) == (59, 1)
    assert [router.num_tokens for router in record.routers] == [59, 59, 59]


def test_logits_alone_and_a_file_of_routers_alone_are_refused(tmp_path):
    ckpt, _ = sides(BALANCED)
    logits = np.random.default_rng(0).standard_normal((64, 16))
    held = mg.recording({"text/0": logits}, stage="logits")
    with pytest.raises(RecordingError, match="computed on router inputs"):
        mg.outputs(ckpt, held)
    ckpt, rec = sides(BALANCED)
    stored = load_file(ckpt / "model.safetensors")
    save_file(
        {n: t for n, t in stored.items() if "expert" not in n}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((ckpt / "config.json").read_text())
    with pytest.raises(RouterError, match="no tensors of experts"):
        mg.outputs(tmp_path, rec)


#: The gate of layer 0.
GATE = "model.layers.0.self_attn.gate_proj.weight"

HEADS, SHARED, WIDTH, HIDDEN = 4, 2, 8, 32
CONFIG = {"model_type": "afmoe", "head_dim": WIDTH, "layer_types": ["full_attention"] * 2}


def tensors_of(layer: int, seed: int = 0, gate: int = HEADS * WIDTH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed + layer)
    shapes = {
        "q": (HEADS * WIDTH, HIDDEN),
        "v": (SHARED * WIDTH, HIDDEN),
        "o": (HIDDEN, HEADS * WIDTH),
        "gate": (gate, HIDDEN),
    }
    start = f"model.layers.{layer}.self_attn."
    return {f"{start}{n}_proj.weight": random.standard_normal(s) for n, s in shapes.items()}


def write(folder: Path, *layers: dict[str, np.ndarray], **config: object) -> str:
    folder.mkdir(exist_ok=True)
    save_file({k: v for layer in layers for k, v in layer.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


@pytest.fixture
def looked_at(tmp_path):
    def look(*layers: dict[str, np.ndarray], config: dict | None = None, **options) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return mg.attention(write(folder, *layers, **(config or {})), **options).value

    return look


def test_dead_and_doubled_heads_are_those_that_were_planted(looked_at):
    first, second = tensors_of(0), tensors_of(1)
    output = second["model.layers.1.self_attn.o_proj.weight"]
    output[:, :WIDTH] = 0.5 * output[:, WIDTH : 2 * WIDTH]
    output[:, 3 * WIDTH :] *= 0.001
    healthy, spoilt = looked_at(first, second).layers
    assert (healthy.dead, healthy.alike) == ([], ())
    assert spoilt.dead == [3]
    assert [pair[:2] for pair in spoilt.alike] == [(0, 1)]
    assert [head.value_head for head in spoilt.heads] == [0, 0, 1, 1]
    assert looked_at(first, second, layers="1").layers == (spoilt,)
    (figure,) = attention_figures(looked_at(first, second))
    lengths, ranks, _ = (panel.marks[0].values for panel in figure.panels)
    assert lengths[1][3] < 0.01 < 0.5 < min(lengths[0])
    assert ranks[1] == [head.effective_rank for head in spoilt.heads]
    assert dict(figure.columns)["product_norm"][4:] == [head.product_norm for head in spoilt.heads]


def test_the_gram_score_of_a_gate_is_that_of_the_rows_of_each_head_also_in_eight_bits(looked_at):
    (layer,) = looked_at(tensors_of(0)).layers
    rows = tensors_of(0)[GATE].reshape(HEADS, WIDTH, HIDDEN)
    expected = [gram_score(cosines(one @ one.T)) for one in rows]
    assert [head.gate_gram for head in layer.heads] == pytest.approx(expected)
    assert layer.gram == pytest.approx(np.mean(expected))
    assert layer.gram_random == pytest.approx(1.0 - HIDDEN**-0.5)
    lengths = np.sqrt((rows**2).sum(axis=2).mean(axis=1))
    assert [head.gate_norm for head in layer.heads] == pytest.approx(lengths)
    tensors = tensors_of(0)
    whole = tensors[GATE].astype(ml_dtypes.float8_e4m3fn)
    tensors[GATE] = (2.0 * whole.astype(np.float64)).astype(np.float32)
    (plain,) = looked_at(tensors).layers
    packed = {GATE: whole, f"{GATE}_scale_inv": np.full((1, 1), 2.0, np.float32)}
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (decoded,) = looked_at(tensors | packed, config={"quantization_config": how}).layers
    assert decoded.heads == plain.heads


def test_the_file_has_a_row_for_each_head_as_the_record_has(looked_at, tmp_path):
    record = looked_at(tensors_of(0), tensors_of(1), out=tmp_path / "heads.parquet")
    rows = pq.read_table(tmp_path / "heads.parquet").to_pylist()
    heads = [(layer.layer, head) for layer in record.layers for head in layer.heads]
    for row, (layer, head) in zip(rows, heads, strict=True):
        assert {name: row[name] for name in vars(head)} == vars(head)
        assert row["layer"] == layer


def test_what_is_too_much_or_not_there_is_an_error(looked_at, monkeypatch, tmp_path):
    monkeypatch.setattr("moegeom.studies.announced._UNASKED", 1000)
    with pytest.raises(UsageError, match="of attention are to be read"):
        looked_at(tensors_of(0))
    (layer,) = looked_at(tensors_of(0), yes=True).layers
    assert layer.num_bytes == 8 * HIDDEN * WIDTH * (2 * HEADS + SHARED)  # gate, outputs, values
    with pytest.raises(RouterError, match="no attention layer of family afmoe"):
        looked_at({"model.layers.0.mlp.router.gate.weight": np.zeros((4, 8))})
    with pytest.raises(UsageError, match="parquet"):  # before anything is read
        mg.attention(str(tmp_path / "nowhere"), out=tmp_path / "heads.csv")


def test_a_gate_of_another_shape_or_not_finite_leaves_its_layer_out_and_says_why(looked_at):
    record = looked_at(tensors_of(0), tensors_of(1, gate=20))
    assert [layer.layer for layer in record.layers] == ["text/0"]
    ((name, why),) = record.left_out
    assert name == "text/1"
    assert "has 20 rows, expected 32 for 4 heads" in why
    assert why in text_of(record)
    tensors = tensors_of(0)
    tensors[GATE][3, 3] = np.nan
    broken = looked_at(tensors)
    assert broken.layers == ()
    assert "not finite" in broken.left_out[0][1]


def test_a_sink_of_minus_infinity_is_none_and_no_gate_is_guessed_from_names(looked_at):
    sinks = {"model.layers.0.self_attn.sinks": np.array([1.0, -np.inf, 0.0, -2.0])}
    (layer,) = looked_at(tensors_of(0), sinks, config={"model_type": "gpt_oss"}).layers
    assert [head.sink for head in layer.heads] == [1.0, None, 0.0, -2.0]
    record = looked_at(tensors_of(0), config={"model_type": "olmoe"})
    assert (record.family, record.layers) == ("", ())
    assert "No gate found: model_type 'olmoe'" in text_of(record)


def test_every_file_of_a_family_says_where_it_was_read():
    for name in attention_families():
        family = load_attention_family(name)
        assert family.source.startswith("transformers 5.23.0 modeling_")
        assert family.gate or family.sink
        assert family.output or family.no_products


def text_of(record) -> str:
    return unwrapped(worded(document, record, detail=True))
