"""Rows that were never trained, copies of routers, and experts that are copies with noise are
found, and no others.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moegeom.checkpoint.ranks import are_ranks
from moegeom.core.errors import CheckpointError
from moegeom.core.router import Provenance, Router, RouterSet, Rule, Weights
from moegeom.engine.run_facts import initialised_facts
from moegeom.router.facts import drawn_rows
from moegeom.studies.check.study import GateRequest, gate
from tests.by_day import by_day
from tests.museum.healthy import trained
from tests.unit.check.conftest import BIAS, GAIN, GATE, Case, keep, outcome_of, write_model
from tests.unit.check.defects import EXPERT, OF_EXPERTS, _set, trained_experts, upcycled
from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf


def noted(path: Path) -> set[str]:
    outcome = outcome_of(gate(GateRequest(str(path))), "MGG207")
    return {router for finding in outcome.findings for router in finding.routers}


def test_routers_drawn_anew_are_noted_and_do_not_fail_the_gate(tmp_path):
    def drawn(weight, layer):
        return 0.02 * np.random.default_rng([12, layer]).standard_normal(weight.shape)

    model = trained("olmoe-balanced/step_1500")
    assert noted(model.edited("weight", drawn).write(tmp_path / "all")) == {
        "text/0", "text/1", "text/2"
    }  # fmt: skip
    assert noted(model.edited("weight", drawn, (1,)).write(tmp_path / "one")) == {"text/1"}
    assert gate(GateRequest(str(tmp_path / "one"))).verdict.exit_code == 0


def routers(weight: np.ndarray) -> RouterSet:
    rule = Rule(1, "softmax", Weights("scores"))
    provenance = Provenance("made up", ("w",), "", "BF16")
    one = Router("text/0", "text", 0, weight.astype(np.float32), rule, provenance)
    return RouterSet((one,), "m", "f", "", "", initializer_range=0.02)


def errors(weight: np.ndarray) -> np.ndarray:
    """The three distances in standard errors, as the check has them."""
    facts = routers(weight)
    (row,) = initialised_facts(facts, facts.routers)["routers"]
    n = row["num_weights"]
    return np.array(
        [
            (row["std"] / 0.02 - 1.0) * np.sqrt(2.0 * n),
            row["mean"] / 0.02 * np.sqrt(n),
            row["kurtosis"] * np.sqrt(n / 24.0),
        ]
    )


def test_the_three_distances_are_standard_normal_for_what_was_drawn():
    random = np.random.default_rng(5)
    drawn = [0.02 * random.standard_normal((16, 64)) for _ in range(800)]
    scores = np.array([errors(w.astype(ml_dtypes.bfloat16)) for w in drawn])
    np.testing.assert_allclose(scores.mean(axis=0), 0.0, atol=0.15)
    np.testing.assert_allclose(scores.std(axis=0), 1.0, atol=0.12)
    assert (np.abs(scores) <= 3.0).all(axis=1).mean() > 0.97


def test_drawn_rows_have_their_law_at_any_size_and_trained_ones_have_none():
    random, shape = np.random.default_rng(8), (32, 1024)
    laws: dict[str, list[str | None]] = {"normal": [], "uniform": [], "": []}
    for number in range(100):
        size, common = 10.0 ** random.uniform(-4, 1), random.standard_normal(shape[1])
        tails = random.standard_t(5, shape)
        weights = {
            "normal": random.standard_normal(shape),
            "uniform": random.uniform(-1.0, 1.0, shape),
            "": (tails, random.standard_normal(shape) + 0.3 * common)[number % 2],
        }
        for law, weight in weights.items():
            stored = (size * weight).astype(ml_dtypes.bfloat16)
            facts = routers(stored)
            none = RouterSet(facts.routers, "m", "f", "", "")
            laws[law].append(initialised_facts(none, none.routers)["routers"][0]["law"])
    assert {law: sum(one == law for one in found) for law, found in laws.items()} == {
        "normal": 100, "uniform": 100, "": 100
    }  # fmt: skip


#: Rows that are not as drawn: tails, a direction in common, few directions, lengths.
TRAINED: tuple[Callable[[np.random.Generator, tuple[int, int]], np.ndarray], ...] = (
    lambda random, shape: random.standard_t(8, shape),
    lambda random, shape: random.standard_normal(shape) + 0.2 * random.standard_normal(shape[1]),
    lambda random, shape: partly_drawn(*shape, 0, int(random.integers(1000))),
    lambda random, shape: random.standard_normal(shape) * np.exp(
        0.1 * random.standard_normal((shape[0], 1))
    ),
)  # fmt: skip
DRAWN = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "uniform": lambda random, shape: random.uniform(-1.0, 1.0, shape),
}


def facts_of(weights: list[np.ndarray]) -> dict:
    (one,) = routers(weights[0]).routers
    named = [
        replace(one, name=f"text/{n}", layer=n, weight=w.astype(np.float32))
        for n, w in enumerate(weights)
    ]
    return initialised_facts(RouterSet(tuple(named), "m", "f", "", ""), named)


def test_a_run_of_drawn_rows_among_trained_ones_is_named_with_its_law_and_no_other():
    shapes = (64, 1024), (128, 512), (32, 2048), (256, 512)
    parts = (0, 4), (4, 8), (2, 6), (0, 6), (1, 5)
    for number, (shape, part) in enumerate(product(shapes, parts)):
        random = np.random.default_rng([11, number])
        size, law = 10.0 ** random.uniform(-3, 1), ("normal", "uniform")[number % 2]
        weight = size * TRAINED[number % 4](random, shape) / np.sqrt(shape[1])
        first, last = (shape[0] * eighth // 8 for eighth in part)
        weight[first:last] = size * DRAWN[law](random, (last - first, shape[1]))
        others = [TRAINED[n % 4](random, shape) for n in range(-(-(2**18) // weight.size))]
        facts = facts_of([weight.astype(ml_dtypes.bfloat16), *others])
        rows = list(range(first, last))
        assert facts["groups"] == [
            {"router": "text/0", "num_rows": shape[0], "rows": rows, "law": law}
        ]
        assert not any(row["law"] for row in facts["routers"])


@pytest.mark.parametrize("shape", [(8, 256), (16, 512), (32, 256), (64, 128)])
def test_small_routers_have_their_law_together(shape):
    count, random = 2**18 // (shape[0] * shape[1]), np.random.default_rng(4)
    for law, draw in DRAWN.items():
        weights = [10.0 ** random.uniform(-3, 1) * draw(random, shape) for _ in range(count)]
        assert {row["law"] for row in facts_of(weights)["routers"]} == {law}
        assert {row["law"] for row in facts_of(weights[1:])["routers"]} == {None}
        single = facts_of([weights[0].reshape(1, -1), *weights])  # of one row nothing is said
        assert [row["law"] for row in single["routers"]] == [None, *count * [law]]
        weights[count // 2][:] = TRAINED[2](random, shape)
        weights[count // 3][0] *= 3.0
        assert {row["law"] for row in facts_of(weights)["routers"]} == {""}
    for rows in TRAINED:
        facts = facts_of([rows(random, shape) for _ in range(count)])
        assert "groups" not in facts and {row["law"] for row in facts["routers"]} == {""}


def test_without_a_number_in_the_config_nothing_is_judged():
    facts = routers(np.ones((16, 64)))
    none = RouterSet(facts.routers, "m", "f", "", "")
    assert initialised_facts(none, none.routers) == {"routers": []}
    assert initialised_facts(facts, facts.routers)["routers"] == []


# -------------------------------------------------------------------- some rows of a router
SIGMA = 0.02


def partly_drawn(experts: int, hidden: int, drawn: int, seed: int = 0) -> np.ndarray:
    """Rows of which the last ``drawn`` are new, the others of twelve directions and some noise."""
    random = np.random.default_rng([7, seed])
    directions = random.standard_normal((12, hidden))
    rows = random.standard_normal((experts, 12)) @ directions / np.sqrt(12.0)
    rows = 0.8 * rows + 0.6 * random.standard_normal((experts, hidden))
    rows *= SIGMA * np.exp(random.normal(0.0, 0.15, (experts, 1)))
    rows[experts - drawn :] = SIGMA * random.standard_normal((drawn, hidden))
    return rows


@pytest.mark.parametrize(
    ("drawn", "seed"),
    by_day(
        [(drawn, seed) for drawn in (8, 32, 48) for seed in range(20)],
        {"few": (8, 0), "half": (32, 1), "most": (48, 2)},
    ),
)
def test_new_rows_among_trained_ones_are_named(drawn, seed):
    named = drawn_rows(partly_drawn(64, 1024, drawn, seed), SIGMA)
    assert set(named) <= set(range(64 - drawn, 64))
    assert len(named) >= 0.8 * drawn


@pytest.mark.parametrize("seed", by_day(range(60), range(6)))
def test_trained_rows_of_the_drawn_length_are_not_named(seed):
    for shape in ((16, 256), (64, 1024), (256, 512)):
        assert drawn_rows(partly_drawn(*shape, 0, seed), SIGMA) == [], shape


LIKE = {
    "of another spread": lambda r, rows: 1.1 * rows,
    "uniform": lambda r, rows: SIGMA * r.uniform(-np.sqrt(3), np.sqrt(3), rows.shape),
    "of heavy tails": lambda r, rows: SIGMA * r.standard_t(5, rows.shape) * np.sqrt(3 / 5),
    "with a mean": lambda r, rows: np.sqrt(0.99) * rows + 0.1 * SIGMA,
    "along one direction": lambda r, rows: (
        0.9 * rows + np.sqrt(0.19) * SIGMA * r.standard_normal((1, rows.shape[1]))
    ),
}


def test_rows_that_resemble_drawn_ones_are_few_or_broken_are_not_named():
    for what, change in LIKE.items():
        weight = partly_drawn(64, 1024, 32)
        weight[32:] = change(np.random.default_rng(2), weight[32:])
        assert drawn_rows(weight, SIGMA) == [], what
    for shape in ((16, 64, 8), (16, 256, 8), (16, 1024, 3)):
        assert drawn_rows(partly_drawn(*shape), SIGMA) == []
    weight = partly_drawn(64, 1024, 32)
    weight[0], weight[1] = np.nan, 0.0
    assert set(drawn_rows(weight, SIGMA)) <= set(range(32, 64))


def test_a_router_whose_rows_share_a_direction_is_not_taken_for_drawn(judged):
    def aligned(tensors, config):
        config["initializer_range"] = 0.02
        for layer in range(3):
            random = np.random.default_rng(layer)
            rows = random.standard_normal((16, 256))
            rows = np.sqrt(0.9) * rows + np.sqrt(0.1) * random.standard_normal(256)
            tensors[GATE.format(layer)] = (0.02 * rows).astype(np.float32)

    assert outcome_of(judged(Case(hidden=256), aligned), "MGG207").state == "passed"


LAYERS = Case(layers=4, hidden=128)


def of_gate(code: str, target: str = "model"):
    return outcome_of(gate(GateRequest(target)), code)


@pytest.fixture
def spoilt(judged):
    """The model with layer 3 made of layer 0 and of itself."""

    def outcome(change):
        def spoil(tensors, config):
            first, last = (tensors[GATE.format(n)].astype(np.float32) for n in (0, 3))
            tensors[GATE.format(3)] = change(first, last)

        return outcome_of(judged(LAYERS, spoil), "MGI112")

    return outcome


COPIES = {
    "equal": (lambda a, b: a, "hold the same router"),
    "twice as long": (lambda a, b: 2 * a, "layer 3 is 2 times that of layer 0"),
    "a third": (lambda a, b: a / 3, "0.3333 times"),
    "less one": (lambda a, b: np.vstack([a[:15], b[15:]]), "share 15 rows"),
    "two rows": (lambda a, b: np.vstack([b[:5], a[5:7], b[7:]]), "share 2 rows"),
    "moved": (lambda a, b: np.vstack([b[:4], a[:8], b[12:]]), "share 8 rows"),
}


@pytest.mark.parametrize("what", COPIES)
def test_a_copied_router_or_block_is_an_error(spoilt, what):
    change, words = COPIES[what]
    (finding,) = spoilt(change).findings
    assert (finding.severity, finding.routers) == ("error", ("text/0", "text/3"))
    assert words in finding.title
    if what == "moved":  # where its rows came from and went
        assert (
            "Experts 0-7 of the one are experts 4-11 of the other, 4 further on" in finding.detail
        )


def test_a_copy_through_bfloat16_is_found_in_float32(judged):
    def spoil(tensors, config):
        for layer in range(4):
            exact = tensors[GATE.format(layer)].astype(np.float32)
            noise = np.random.default_rng(layer).standard_normal(exact.shape)
            tensors[GATE.format(layer)] = (exact * (1 + 1e-3 * noise)).astype(np.float32)
        tensors[GATE.format(2)] = tensors[GATE.format(0)].astype("bfloat16")

    (finding,) = outcome_of(judged(LAYERS, spoil), "MGI112").findings
    assert finding.title == "the router of layer 2 is a cast of that of layer 0."


HEALTHY = {
    "its own": lambda a, b: b,
    "one row alone": lambda a, b: np.vstack([a[:1], b[1:]]),
    "rows of one length": lambda a, b: b / np.linalg.norm(b, axis=1, keepdims=True),
    "the lengths of another": lambda a, b: (
        b
        * np.random.default_rng(3).permutation(np.linalg.norm(a, axis=1))[:, None]
        / np.linalg.norm(b, axis=1, keepdims=True)
    ),
}


def test_routers_of_which_no_number_is_left_are_no_copies(judged):
    def spoil(tensors, config):
        for layer in range(4):
            tensors[GATE.format(layer)] = np.full((16, 64), np.nan, np.float32)

    assert not outcome_of(judged(LAYERS, spoil), "MGI112").findings


@pytest.mark.parametrize("what", HEALTHY)
def test_what_only_resembles_a_copy_is_none(spoilt, what):
    assert spoilt(HEALTHY[what]).state == "passed"


WRAPPED = {
    "base_model.model.{}": GATE,
    "module.{}": BIAS,
    "state_dict._orig_mod.{}": GAIN,
    "module.base_model.model.{}": GATE,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_part_of_a_router_that_a_wrapper_holds_too_is_a_copy(judged, wrapper):
    def copied(change):
        def spoil(tensors, config):
            name = WRAPPED[wrapper].format(1)
            tensors[wrapper.format(name)] = change(tensors[name])

        return outcome_of(judged(Case(family="deepseek_v3"), spoil), "MGI114")

    assert copied(lambda values: values).state == "passed"
    (finding,) = copied(lambda values: np.full_like(values, np.nan)).findings
    assert finding.severity == "error"
    assert "is also there as" in finding.title


def ranked(tmp_path, change, names=("model-rank-0", "model-rank-1")):
    """The model in a file for each of two ranks; ``change`` what the second one has of a gate."""
    model = write_model(tmp_path, Case(), keep)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    other = {n: change(t) if n == GATE.format(1) else t for n, t in tensors.items()}
    for file, held in zip(names, (tensors, other), strict=True):
        (model / file).parent.mkdir(exist_ok=True)
        save_file({n: np.ascontiguousarray(t) for n, t in held.items()},
                  model / f"{file}.safetensors")  # fmt: skip
    return model


FILES, IN_FOLDERS = ("model-rank-0", "model-rank-1"), ("rank_0/model", "rank_1/model")


@pytest.mark.parametrize("names", [FILES, IN_FOLDERS])
def test_ranks_that_hold_one_router_are_one_checkpoint(tmp_path, names):
    model = ranked(tmp_path, lambda gate: gate, names)
    (model / "notes").mkdir()
    assert (gate(GateRequest("model")).exit_code, of_gate("MGI114").state) == (0, "passed")
    if names == IN_FOLDERS:  # a config in the first of them counts for all
        (model / "config.json").rename(model / "rank_0/config.json")
        assert gate(GateRequest("model")).exit_code == 0


@pytest.mark.parametrize("names", [FILES, IN_FOLDERS])
def test_a_router_that_differs_between_ranks_is_an_error_with_the_rows_counted(tmp_path, names):
    def drifted(gate):
        moved = gate.copy()
        moved[[2, 7]] *= gate.dtype.type(1.02)
        return moved

    ranked(tmp_path, drifted, names)
    (finding,) = of_gate("MGI114").findings
    assert gate(GateRequest("model")).exit_code == 1
    assert f"{names[0]}.safetensors and in {names[1]}.safetensors" in finding.title
    assert "with other numbers in 2 rows of 16" in finding.title
    # a slice in another rank is no copy that is equal
    ranked(tmp_path, lambda gate: gate[:8], names)
    (finding,) = of_gate("MGI114").findings
    assert "with other shapes or dtypes" in finding.title


def test_folders_that_are_no_ranks_are_not_joined(tmp_path):
    ranked(tmp_path, lambda gate: gate, ("step_1/model", "step_2/model"))
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        gate(GateRequest("model"))


RANKS = {
    ("model-rank-0", "model-rank-1"): True,
    ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"): True,
    ("tp0.safetensors", "tp1.safetensors"): True,
    ("model_rank_0_of_2", "model_rank_1_of_2"): True,
    ("model-00001-of-00002", "model-00002-of-00002"): False,
    ("consolidated.00.pth", "consolidated.01.pth"): False,
    ("step1.pt", "step2.pt"): False,
    ("model-rank-0",): False,
    ("model-rank-0", "other-rank-1"): False,
    ("rank_0/a", "rank_0/b", "rank_1/a", "rank_1/b"): True,
    ("rank_0/a", "rank_0/b", "rank_1/a"): False,
    (): False,
}


def test_only_files_that_differ_in_the_number_of_a_rank_are_ranks():
    assert {names: are_ranks(names) for names in RANKS} == RANKS


BF16 = ml_dtypes.bfloat16
COPIED = OF_EXPERTS["MGG208"]


@pytest.fixture
def judge(judged):
    def outcome(case, **options):
        return outcome_of(judged(case, experts=True, select=("MGG208",), **options), "MGG208")

    return outcome


def every(change):
    """Spoils the experts of layer 1, expert by expert, after they were made copies with noise."""

    def spoil(tensors, config):
        upcycled(tensors, config)
        for leaf in ("gate", "up", "down"):
            for expert in range(16):
                name = EXPERT.format(1, expert, leaf)
                values = tensors[name].astype(np.float64)
                changed = change(values, expert)
                tensors[name] = changed.astype(BF16) if changed.dtype == np.float64 else changed

    return replace(COPIED, spoil=spoil)


def test_copies_with_noise_are_named_and_the_bytes_read_are_announced(tmp_path):
    watch = Mock()
    model = str(write_model(tmp_path, COPIED, COPIED.spoil))
    request = GateRequest(model, experts=True, select=("MGG208",))
    (outcome,) = gate(request, watch).verdict.outcomes
    (finding,) = outcome.findings
    assert (outcome.state, finding.routers) == ("failed", ("text/1",))
    assert "16 of 16 experts differ by noise alone" in finding.title
    watch.say.assert_called_once_with("reads 590 kB of experts")


def test_equal_experts_are_told_by_another_check_and_nearly_equal_ones_by_this(judged):
    first = {}
    case = every(lambda v, e: first.setdefault(v.shape, v))
    verdict = judged(case, experts=True, select=("MGG208", "MGI125"))
    assert [outcome_of(verdict, code).state for code in ("MGG208", "MGI125")] == [
        "passed",
        "failed",
    ]
    assert "copies among experts of text/1 (fewer than two are whole and differ)" in (
        verdict.verdict.not_looked_at
    )
    first.clear()
    case = every(
        lambda v, e: (
            first.setdefault(v.shape, v) * (1.0 + 2e-3 * (np.arange(v.size) == e).reshape(v.shape))
        )
    )
    (finding,) = outcome_of(judged(case, experts=True, select=("MGG208",)), "MGG208").findings
    assert "the last digits of their storage" in finding.title


def _by_tokens(values, expert):
    """An outer product, as a group of tokens makes it, with half of the energy of the noise."""
    random = np.random.default_rng(expert)
    along = np.outer(random.standard_normal(len(values)), random.standard_normal(values.shape[1]))
    return values + 0.007 * along


def _last_alone(values, expert):
    random = np.random.default_rng(expert)
    return values if values.shape == (32, 64) else 0.02 * random.standard_normal(values.shape)


def test_experts_that_grew_apart_are_no_copies(judge):
    for change in (_by_tokens, _last_alone):
        assert judge(every(change)).state == "passed"


def _of_first(change):
    return every(lambda values, expert: change(values) if expert == 0 else values)


def _too_large(tensors, config):
    upcycled(tensors, config)
    for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
        tensors[name] = tensors[name].astype(np.float64) * 1e200


#: Experts of layer 1 that are copies, but for those that are broken, and how many are named.
BROKEN = {
    "one zero": (_of_first(lambda values: 0.0 * values), 15),
    "a nan in one": (_of_first(lambda values: _set(values, (0, 0), np.nan)), 15),
    "one infinite": (_of_first(lambda values: values + np.inf), 15),
    "too large": (replace(COPIED, spoil=_too_large), 16),
}


@pytest.mark.parametrize(("case", "number"), BROKEN.values(), ids=BROKEN)
def test_experts_that_are_broken_leave_the_others_to_be_judged(case, number, judge):
    (finding,) = judge(case).findings
    assert f"{number} of 16 experts" in finding.title


def _share(*changes):
    """Writes tensors of experts of layer 1 over others: ``(layer, expert, leaf)`` of each."""

    def spoil(tensors, config):
        for to, of in changes:
            tensors[EXPERT.format(*to)] = tensors[EXPERT.format(*of)]

    return spoil


def _shared_expert(factor):
    def spoil(tensors, config):
        for layer in range(3):
            for leaf, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
                values = np.random.default_rng([layer, len(leaf)]).standard_normal(shape)
                name = f"model.layers.{layer}.mlp.shared_expert.{leaf}_proj.weight"
                tensors[name] = (values * (factor if layer == 1 else 1.0)).astype(BF16)

    return spoil


LEAVES = ("gate", "up", "down")

#: What one matrix of experts of layer 1 shares or lacks, and how it is told.
PARTLY = {
    "one matrix of two": (
        _share(((1, 3, "down"), (1, 9, "down"))),
        "2 of 16 experts share their down matrix with another: 3, 9.",
    ),
    "the layer before": (
        _share(*(((1, e, leaf), (0, e, leaf)) for e in range(16) for leaf in LEAVES)),
        "16 experts of layer 1 have the down and gate and up matrices of experts of layer 0.",
    ),
    "one matrix of the layer before": (
        _share(*(((1, e, "up"), (0, e, "up")) for e in range(16))),
        "16 experts of layer 1 have the up matrix of experts of layer 0.",
    ),
    "one matrix of zeros": (
        lambda tensors, config: tensors.update(
            {EXPERT.format(1, 3, "down"): -0.0 * tensors[EXPERT.format(1, 3, "down")]}
        ),
        "1 expert of 16 (3) has a matrix that is all 0.",
    ),
    "shared experts of zeros": (
        _shared_expert(0.0),
        (
            "shared experts: 'model.layers.1.mlp.shared_expert.down_proj.weight' and 2 more tensors "
            "all 0."
        ),
    ),
    "shared experts that are not finite": (
        _shared_expert(np.nan),
        (
            "shared experts: 'model.layers.1.mlp.shared_expert.down_proj.weight' and 2 more tensors "
            "not finite."
        ),
    ),
    "shared experts with numbers": (_shared_expert(0.02), None),
}


@pytest.mark.parametrize(("spoil", "title"), PARTLY.values(), ids=PARTLY)
def test_one_matrix_that_is_shared_or_zero_is_enough_in_a_layer_or_across_layers(
    spoil, title, judged
):
    case = Case(spoil, made=trained_experts)
    outcome = outcome_of(judged(case, experts=True, select=("MGI125",)), "MGI125")
    assert [one.title for one in outcome.findings] == [title] * (title is not None)


def _missing(tensors, config):
    for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
        del tensors[name]


#: Experts of layer 1 that are not judged, and the reason.
UNKNOWN = {
    "all zero": (every(lambda values, e: 0.0 * values), "copies among experts of text/1"),
    "no floats": (every(lambda values, e: values.astype(np.int8)), "is stored as I8"),
    "missing": (replace(COPIED, spoil=_missing), "no tensors of experts"),
}


@pytest.mark.parametrize(("case", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_one_layer_that_cannot_be_judged_is_named_and_is_inconclusive_where_it_is_required(
    case, reason, judged, tmp_path
):
    verdict = judged(case, experts=True, select=("MGG208",)).verdict
    assert outcome_of(judged(case, experts=True, select=("MGG208",)), "MGG208").state == "passed"
    assert any(reason in line for line in verdict.not_looked_at)
    (tmp_path / "p.toml").write_text('require = ["MGG208"]\n')
    required = gate(GateRequest("model", experts=True, profile=tmp_path / "p.toml"))
    outcome = outcome_of(required, "MGG208")
    assert (outcome.state, outcome.num_open) == ("inconclusive", 1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes of four bits in a byte, the first in its low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def _words(codes: np.ndarray) -> np.ndarray:
    return _nibbles(codes).view(np.int32)


def _four_bits(values: np.ndarray, group: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Codes from 0 to 15 around 8, and the scale of each run of columns."""
    runs = values.reshape(len(values), -1, group)
    scale = np.abs(runs).max(axis=2, keepdims=True) / 7.0
    return (np.rint(runs / scale) + 8).astype(np.uint8).reshape(values.shape), scale[:, :, 0]


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _e2m1(values: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    runs = values.reshape(len(values), -1, group)
    scale = 2.0 ** np.ceil(np.log2(np.abs(runs).max(axis=2, keepdims=True) / 6.0))
    codes = np.abs(np.abs(runs / scale)[..., None] - E2M1).argmin(axis=-1) | (runs < 0) << 3
    return codes.astype(np.uint8).reshape(values.shape), scale[:, :, 0]


def _fp8(values):
    scale = np.abs(values).max() / 448.0
    yield "weight", (values / scale).astype(ml_dtypes.float8_e4m3fn)
    yield "weight_scale", np.array(scale, np.float32)


def _gptq(values):
    codes, scale = _four_bits(values)
    yield "qweight", np.ascontiguousarray(_words(codes).T)
    yield "scales", np.ascontiguousarray(scale.T.astype(np.float16))
    yield "qzeros", np.full((scale.shape[1], len(values) // 8), 0x77777777, np.int32)


def _awq(values):
    codes, scale = _four_bits(values)
    yield "qweight", _words(np.ascontiguousarray(codes.T))
    yield "scales", np.ascontiguousarray(scale.T.astype(np.float16))
    yield "qzeros", np.full((scale.shape[1], len(values) // 8), -2004318072, np.int32)


def _packed(values):
    codes, scale = _four_bits(values)
    yield "weight_packed", _words(codes)
    yield "weight_scale", scale.astype(BF16)
    yield "weight_shape", np.array(values.shape, np.int64)


def _mxfp4(values):
    codes, scale = _e2m1(values, 32)
    yield "weight_packed", _nibbles(codes)
    yield "weight_scale", (np.log2(scale) + 127).astype(np.uint8)


def _nvfp4(values):
    codes, scale = _e2m1(values, 16)
    yield "weight", _nibbles(codes)
    yield "weight_scale", (64.0 * scale).astype(ml_dtypes.float8_e4m3fn)
    yield "weight_scale_2", np.array(1 / 64.0, np.float32)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
STORAGES = {
    "float16": (lambda values: [("weight", values.astype(np.float16))], {}),
    "fp8": (_fp8, {"quant_method": "fp8"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "int4": (_packed, {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": _INT4}}}),
    "mxfp4": (_mxfp4, {"quant_method": "compressed-tensors"}),
    "nvfp4": (_nvfp4, {"quant_method": "modelopt"}),
}  # fmt: skip


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pair_of_copies_is_found_in_every_storage_and_healthy_experts_are_not(storage, judged):
    store, table = STORAGES[storage]

    def spoil(tensors, config, noise=1e-4):
        trained_experts(tensors, config)
        config["quantization_config"] = table | {"ignore": ["re:.*gate$"]}
        for leaf in ("gate", "up", "down") if noise else ():
            values = tensors[EXPERT.format(1, 5, leaf)].astype(np.float64)
            noisy = values + noise * np.random.default_rng(3).standard_normal(values.shape)
            tensors[EXPERT.format(1, 11, leaf)] = noisy
        for name in [name for name in tensors if ".experts." in name]:
            values = tensors.pop(name).astype(np.float64)
            tensors.update({f"{name[:-6]}{part}": one for part, one in store(values)})

    found = judged(replace(COPIED, spoil=spoil), experts=True)
    (finding,) = outcome_of(found, "MGG208").findings
    assert finding.routers == ("text/1",)
    assert "2 of 16 experts" in finding.title and "5, 11" in finding.title
    healthy = judged(COPIED, lambda *of: spoil(*of, noise=0.0), experts=True)
    assert outcome_of(healthy, "MGG208").state == "passed"
    assert not [
        o.code for o in healthy.verdict.outcomes if o.code[:3] == "MGI" and o.state == "failed"
    ]
    assert healthy.verdict.exit_code == 0


def test_a_pair_of_copies_is_found_in_every_block_format_of_gguf(tmp_path):
    draw, kinds = np.random.default_rng(8), ("Q8_0", "Q4_0", "Q5_1", "Q6_K", "TQ2_0", "MXFP4")
    for kind in kinds:
        type_ = gguf.GGMLQuantizationType[kind]
        try:
            gguf.quants.quantize(np.ones((1, 256), np.float32), type_)
        except NotImplementedError:
            continue
        tensors, types = (
            {
                "blk.0.ffn_gate_inp.weight": 0.1 * draw.standard_t(6, (8, 256)),
                "blk.0.ffn_norm.weight": np.ones(256),
            },
            {},
        )
        for leaf in ("gate", "up", "down"):
            values = 0.02 * draw.standard_t(6, (8, 256, 256)).astype(np.float32)
            values[5] = values[2] + 1e-4 * draw.standard_normal((256, 256))
            tensors[name := f"blk.0.ffn_{leaf}_exps.weight"] = gguf.quants.quantize(values, type_)
            types[name] = type_
        tensors = {n: v if n in types else v.astype(np.float32) for n, v in tensors.items()}
        path = write_gguf(
            tmp_path / f"{kind}.gguf", "qwen3moe", tensors, types, keys=moe_keys(8, 256)
        )
        found = gate(GateRequest(str(path), experts=True))
        (finding,) = outcome_of(found, "MGG208").findings
        assert "2 of 8 experts" in finding.title and "2, 5" in finding.title, kind


def test_without_the_option_nobody_counts_it_but_who_names_it(judged, tmp_path):
    usual = judged(COPIED, keep, experts=False).verdict
    assert "MGG208" not in [outcome.code for outcome in usual.outcomes]
    assert "expert weights" in usual.not_looked_at
    named = gate(GateRequest("model", select=("MGG208",))).verdict
    assert [o.state for o in named.outcomes] == ["needs experts"]
    assert named.exit_code == 4
    profile = tmp_path / "p.toml"
    profile.write_text('require = ["MGG208"]\n')
    required = gate(GateRequest("model", profile=profile))
    assert (outcome_of(required, "MGG208").state, required.exit_code) == ("inconclusive", 4)
    read = gate(GateRequest("model", experts=True)).verdict
    assert "expert weights beyond a sample" in read.not_looked_at


def test_every_plain_format_is_read(judge):
    for dtype in (np.float16, np.float32, BF16):

        def spoil(tensors, config, dtype=dtype):
            upcycled(tensors, config)
            for name in [name for name in tensors if ".experts." in name]:
                tensors[name] = tensors[name].astype(dtype)

        outcome = judge(replace(COPIED, spoil=spoil))
        assert [finding.routers for finding in outcome.findings] == [("text/1",)]
