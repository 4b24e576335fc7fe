"""What a config leaves open, forbids or asks of quantisers is said, and read without harm."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moegeom.checks.check import OLDER
from moegeom.core.errors import GATING_UNSAID, RouterError
from moegeom.router.family import Choice
from moegeom.router.settings import Settings
from moegeom.router.storage import Quantisation, quantisation_tables
from moegeom.studies.check.study import GateRequest, gate
from tests.ends import work_ends
from tests.unit.check.conftest import BIAS, Case, keep, outcome_of, with_token_table
from tests.unit.check.defects import SAID, setting, tensor, together, without

GATE = "model.layers.3.mlp.gate"


SPOKEN = Case(family="deepseek_v3", made=setting(**SAID))

#: One whose gates are linear modules.
LINEAR = Case()


@pytest.fixture
def judge(judged):
    """One outcome of the gate on a deepseek_v3 that says all that engines read."""

    def outcome(code, spoil, **options):
        return outcome_of(judged(SPOKEN, spoil, **options), code)

    return outcome


def test_every_key_that_an_engine_needs_is_named_with_what_it_takes(judge):
    outcome = judge("MGI113", lambda tensors, config: [config.pop(key) for key in SAID])
    titles = [finding.title for finding in outcome.findings]
    assert titles == [
        "the config does not say 'scoring_func': vLLM takes softmax.",
        "the config does not say 'topk_method': vLLM leaves the selection bias out.",
    ]
    assert {finding.severity for finding in outcome.findings} == {"warning"}
    strict = judge("MGI113", without("scoring_func"), profile=Path("release"))
    assert [finding.severity for finding in strict.findings] == ["error"]


def test_a_default_of_the_family_is_told_as_assumed(judge):
    (finding,) = judge("MGI113", together(with_token_table, without("scoring_func"))).findings
    assert "Assumed is sqrt-softplus, the default of transformers" in finding.detail


def test_a_gating_function_that_is_not_given_has_a_refusal_of_its_own():
    choice = Choice(key="gate", values={"1": "softmax", "2": "sigmoid"}, unset="0")
    for config, fault in (
        ({}, "is not given"), ({"gate": 0}, "is 0, which names no"), ({"gate": "0"}, "is 0")
    ):  # fmt: skip
        with pytest.raises(RouterError, match=f"'gate' {fault}") as caught:
            Settings(config).choose(choice)
        assert caught.value.code == GATING_UNSAID
        assert "1 is softmax, 2 is sigmoid" in caught.value.hint
    with pytest.raises(RouterError, match="'gate' is 7 .*expected '1' or '2'") as caught:
        Settings({"gate": 7}).choose(choice)
    assert not caught.value.code


#: More kept than there are, groups of one expert, too few experts kept, groups that do not divide.
IMPOSSIBLE = ((4, 5), (16, 8), (8, 1), (3, 1))


@pytest.mark.parametrize(("num_groups", "num_kept"), IMPOSSIBLE)
def test_impossible_groups_are_a_finding_with_tokens_too(judged, tmp_path, num_groups, num_kept):
    np.savez(tmp_path / "rec.npz", x=np.zeros((4, 64), np.float32))
    for options in ({}, {"tokens": "rec.npz"}):
        report = judged(SPOKEN, setting(n_group=num_groups, topk_group=num_kept), **options)
        assert report.exit_code == 1
        assert [(f.code, f.severity) for f in report.verdict.findings] == [("MGI105", "error")]


def signs(positive_of_each: int, offset: float = 0.0):
    """Four groups of four biases of 0.1, so many of each above 0."""
    signed = np.where(np.arange(16) % 4 < positive_of_each, 0.1, -0.1) + offset
    same = (tensor(BIAS, lambda bias: signed.astype(np.float32), layer) for layer in range(3))
    return together(setting(n_group=4, topk_group=2), *same)


def test_a_dropped_expert_may_win_where_groups_hold_fewer_than_k_biases_above_0(judge):
    for positive, offset, state in (
        (0, 0.0, "failed"),
        (1, 0.0, "failed"),
        (2, 0.0, "passed"),
        (0, 0.2, "passed"),
    ):
        assert judge("MGN120", signs(positive, offset)).state == state


COVERS = {
    "no list": ({}, True),
    "other modules": ({"ignore": ["lm_head", "model.layers.3.mlp.gate_proj"]}, True),
    "the gate of another layer": ({"ignore": ["model.layers.13.mlp.gate"]}, True),
    "by name": ({"ignore": [GATE]}, False),
    "by the end": ({"modules_to_not_convert": ["mlp.gate"]}, False),
    "by a part": ({"modules_to_not_convert": ["gate"]}, False),
    "by a module above": ({"ignored_layers": ["model.layers.3"]}, False),
    "with a prefix": ({"ignore": [f"language_model.{GATE}"]}, False),
    "by a glob": ({"exclude_modules": ["*.mlp.gate"]}, False),
    "by an expression": ({"ignore": ["re:.*mlp.gate$"]}, False),
    "by another expression": ({"ignore": ["re:.*self_attn.*"]}, True),
    "by AutoRound": ({"extra_config": {GATE: {"bits": 16}}}, False),
    "by AutoRound, with 4 bits": ({"extra_config": {GATE: {"bits": 4}}}, True),
    "by GPTQModel": ({"dynamic": {r"-:.*\.gate$": {}}}, False),
    "experts alone": ({"config_groups": {"a": {"targets": ["re:.*experts.*"]}}}, False),
    "all linear": ({"config_groups": {"a": {"targets": ["Linear"]}}}, True),
    "an expression that may not end": ({"ignore": ["re:(.*)*x"]}, None),
    "a broken expression": ({"ignore": ["re:("]}, None),
    "a broken expression, and by name": ({"ignore": ["re:(", GATE]}, False),
    "layers of ModelOpt": (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.3.mlp.up": {}}},
        False,
    ),
    "the gate as a layer of ModelOpt": (
        {"quant_algo": "mixed_precision", "quantized_layers": {GATE: {}}},
        True,
    ),
    "layers of ModelOpt with one method": (
        {"quant_algo": "FP8", "quantized_layers": {"a": {}}},
        True,
    ),
    "no texts": ({"ignore": [3, None, {"a": 1}], "config_groups": {"a": 1, "b": {}}}, True),
}


def asked_by(config):
    """What the tables of a config ask for."""
    found = (Quantisation.of(place, table) for place, table in quantisation_tables(config))
    return [asked for asked in found if asked is not None]


def test_which_modules_a_config_quantises():
    for what, (claims, covers) in COVERS.items():
        (asked,) = asked_by({"quantization_config": {"quant_method": "fp8", **claims}})
        assert asked.covers([GATE]) == [covers], what
    for config in ({}, {"quantization_config": None}, {"quantization_config": 4}):
        assert asked_by(config) == []
    for key, name in (("text_config", "quantization_config"), ("llm_config", "compression_config")):
        (asked,) = asked_by({key: {name: {"quant_method": "fp8", "ignore": ["a"]}}})
        assert asked.key == f"{name}.ignore"


def test_mlx_quantises_what_it_names_and_what_is_stored_so():
    usual = {"bits": 4, "group_size": 64}
    for own, plain, packed in (({}, False, True), ({GATE: usual}, True, True), ({GATE: True}, True, True),
                               ({GATE: False}, False, False)):  # fmt: skip
        for key in ("quantization", "quantization_config"):
            (asked,) = asked_by({key: {**usual, **own}})
            assert asked.covers([GATE]) == [plain]
            assert asked.covers([GATE], are_packed=True) == [packed]
    (asked,) = asked_by({"quantization_config": {**usual, "quant_method": "gptq", GATE: usual}})
    assert not asked.by_path


def test_plain_routers_that_a_table_names_by_path_are_an_error(judge):
    usual = {"bits": 4, "group_size": 64}
    named = {f"model.layers.{layer}.mlp.gate": usual for layer in range(2)}
    (finding,) = judge("MGN119", setting(quantization={**usual, **named})).findings
    assert (finding.routers, finding.severity) == (("text/0", "text/1"), "error")
    assert finding.title == (
        "2 of 3 routers are stored plain, and 'quantization' names them by path."
    )
    assert judge("MGN119", setting(quantization=usual)).state == "passed"


def test_hostile_lists_come_to_an_end():
    modules = [f"model.layers.{layer}.mlp.gate_{'a' * 30}" for layer in range(500)]
    lists = [
        [f"re:{pattern}"]
        for pattern in (
            "(a+)+$", "(.*.*.*.*.*.*)x", ".*" * 90 + "x", "(a|a)*b", "(.|.)" * 38 + "X",
            r"([a-z.0-9]+|\\)*X", "(?x)([a-z.0-9]+) *X", "([a-z.0-9]+)(?#c)*X",
        )
    ]  # fmt: skip
    lists += [["re:.*.*x"] * 60_000, [f"*a*{n}*b" for n in range(60_000)]]
    lists += [[f"model.layers.{n}.mlp" for n in range(600, 100_000)]]
    for entries in lists:
        (asked,) = asked_by({"quantization_config": {"ignore": entries}})
        with work_ends():
            assert set(asked.covers(modules)) <= {True, None}


FP8 = {"quant_algo": "FP8"}
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]

#: By file of the checkpoint what it holds, once with the routers and once without them.
FILES = {
    "hf_quant_config.json": (
        {"quantization": {**FP8, "exclude_modules": ["lm_head"]}},
        {"quantization": {**FP8, "exclude_modules": ["lm_head", "*mlp.gate"]}},
    ),
    "hf_quant_config.json without a table": ({**FP8, "ignore": []}, {**FP8, "ignore": GATES}),
    "hf_quant_config.json of a cache": (
        {"quantization": FP8},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    ),
    "quant_cfg.json": (
        {"quantized_layers": dict.fromkeys(GATES, FP8)},
        {"quantized_layers": {"model.layers.0.mlp.up_proj": FP8}},
    ),
    "quantize_config.json": ({"bits": 4}, {"bits": 4, "modules_to_not_convert": ["gate"]}),
    "quant_config.json": ({"w_bit": 4}, {"w_bit": 4, "modules_to_not_convert": ["gate"]}),
    "quant_model_description.json": (
        {f"{gate}.weight": "W8A8" for gate in GATES}, {f"{gate}.weight": "FLOAT" for gate in GATES}
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_files_beside_the_config_are_judged_like_it(file, judged, tmp_path):
    name = file.split()[0]
    for asks, num_findings in zip(FILES[file], (1, 0), strict=True):

        def beside(tensors, config, asks=asks):
            (tmp_path / "model" / name).write_text(json.dumps(asks), "utf-8")

        plain = judged(LINEAR, beside)
        findings = outcome_of(plain, "MGN119").findings
        assert len(findings) == num_findings
        assert plain.exit_code == 0
        assert all(f"'{name}" in finding.title for finding in findings)
        strict = judged(LINEAR, beside, profile=Path("release"))
        errors = {f.code for f in strict.verdict.findings if f.severity == "error"}
        assert ("MGN119" in errors) == bool(num_findings)


def quantised_to_fp8(tensors, config):
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.gate.weight"
        weight = tensors[name].astype(np.float32)
        scale = np.abs(weight).max() / 400
        tensors[name] = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.full((1, 1), scale, np.float32)


def test_quantised_routers_that_the_config_leaves_out_are_an_error(judge):
    asks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spoil = together(quantised_to_fp8, setting(quantization_config=asks))
    assert judge("MGN119", spoil).state == "passed"
    asks["modules_to_not_convert"] = ["gate"]
    (finding,) = judge("MGN119", spoil).findings
    assert (len(finding.routers), finding.severity) == (3, "error")
    assert "3 routers are stored as fp8" in finding.title


def test_a_router_with_a_selection_bias_of_its_own_module_is_covered_by_its_name_alone(judge):
    asks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert judge("MGN119", setting(quantization_config=asks)).state == "passed"
    groups = {"group_0": {"targets": ["Linear", "model.layers.1.mlp.gate"]}}
    named = setting(quantization_config={"quant_method": "fp8", "config_groups": groups})
    (finding,) = judge("MGN119", named).findings
    assert finding.routers == ("text/1",)


def test_a_pattern_that_cannot_be_tried_leaves_the_check_open(judge):
    claims = {"quant_method": "fp8", "ignore": ["re:(.*)*x"]}
    outcome = judge("MGN119", setting(quantization_config=claims))
    assert outcome.state == "inconclusive"
    assert outcome.reason == (
        "text/0, text/1, text/2: a pattern of 'quantization_config.ignore' is broken, or dear to try"
    )


def test_the_finding_names_key_routers_and_module(judged):
    claims = {"quant_method": "awq", "modules_to_not_convert": ["x"]}
    (finding,) = outcome_of(judged(LINEAR, setting(quantization_config=claims)), "MGN119").findings
    assert finding.routers == ("text/0", "text/1", "text/2")
    assert "3 of 3 routers" in finding.title
    assert "'quantization_config.modules_to_not_convert'" in finding.title
    assert "'model.layers.0.mlp.gate'" in finding.detail


#: Keys that deepseek_v3 does not read, by which 1 of 3 layers with routers is dense; and neutral ones.
DENSE = [
    {"moe_layer_freq": [1, 0, 1]},
    {"moe_layer_freq": 2},
    {"moe_layer_freq": 2.0},
    {"num_dense_layers": 1},
    {"moe_layer_num_skipped": 1},
    {"moe_layer_start_index": [1, 2]},
    {"moe_layer_end_index": 1},
    {"mlp_only_layers": [1]},
    {"moe_layers": [0, 2]},
    {"moe_layers_enum": "1,2"},
    {"mlp_layer_types": ["dense", "sparse", "sparse"]},
]
SPARSE = [
    {"moe_layer_freq": [1, 1, 1, 0]},
    {"moe_layer_freq": 1},
    {"num_dense_layers": 0},
    {"moe_layer_end_index": -1},
    {"mlp_only_layers": []},
    {"decoder_sparse_step": 1},
    {"moe_layers_enum": "0,1,2"},
    {"mlp_layer_types": ["moe", "sparse", "hash_moe"]},
    {"moe_layer_freq": None},
]


def test_layers_that_one_engine_takes_as_dense_are_a_finding(judge, judged, tmp_path):
    judged(SPOKEN, keep, baseline=tmp_path / "sound.json", update_baseline=True)
    for keys in DENSE:
        (key,) = keys
        (finding,) = judge("MGI105", setting(**keys)).findings
        assert (len(finding.routers), finding.severity) == (1, "warning"), keys
        assert f"1 router is in layers where '{key}' lets an engine build none" in finding.title
    spoil = setting(**DENSE[1])
    for option in ({"profile": Path("release")}, {"baseline": tmp_path / "sound.json"}):
        (finding,) = judge("MGI105", spoil, **option).findings
        assert finding.severity == "error"
    judged(SPOKEN, spoil, baseline=tmp_path / "same.json", update_baseline=True)
    (finding,) = judge("MGI105", spoil, baseline=tmp_path / "same.json").findings
    assert finding.severity == "warning"
    for keys in SPARSE:
        assert judge("MGI105", setting(**keys)).state == "passed", keys


def test_no_number_of_experts_makes_all_layers_dense_to_some_engines(judge):
    (finding,) = judge("MGI105", setting(n_routed_experts=None)).findings
    assert (len(finding.routers), finding.severity) == (3, "warning")
    assert "'n_routed_experts' is null" in finding.detail
    assert judge("MGI105", without("n_routed_experts")).state == "passed"


def test_layers_behind_those_for_further_tokens_are_loaded_by_no_engine(judge):
    spoil = setting(num_hidden_layers=2, num_nextn_predict_layers=0)
    (finding,) = judge("MGI105", spoil).findings
    assert (finding.routers, finding.severity) == (("mtp/2",), "warning")
    for more in (1, 4, None):
        spoil = setting(num_hidden_layers=2, num_nextn_predict_layers=more)
        assert judge("MGI105", spoil).state == "passed"


def test_values_of_such_keys_that_make_no_sense_make_all_layers_dense(judge):
    for value in ("two", 0, {}, [[]], [1] * 5000, "1," * 5000, True, [{}]):
        outcome = judge("MGI105", setting(moe_layers_enum=value))
        assert len(outcome.findings[0].routers) == 3, value


def of_config(verdict):
    """What is said by checks that read the config."""
    codes = ("MGI113", "MGN119", "MGN120")
    return {o.code: (o.state, o.reason, o.findings) for o in verdict.outcomes if o.code in codes}


@pytest.fixture
def twice(judged, tmp_path):
    """The gate on the weights of a checkpoint, and on results of it that a scan left."""

    def verdicts(spoil):
        of_weights = judged(SPOKEN, spoil, out=tmp_path / "out.moegeom").verdict
        return of_weights, gate(GateRequest(str(tmp_path / "out.moegeom"))).verdict

    return verdicts


CLAIMS = {
    "nothing unsaid": (keep, set()),
    "gating": (without("scoring_func"), {"MGI113"}),
    "quantisation": (
        setting(quantization_config={"config_groups": {"0": {"targets": ["re:.*gate"]}}}),
        {"MGN119"},
    ),
    "dropped groups": (signs(0), {"MGN120"}),
}


@pytest.mark.parametrize(("spoil", "failed"), CLAIMS.values(), ids=CLAIMS)
def test_results_of_a_scan_are_judged_by_the_config_that_they_were_made_with(twice, spoil, failed):
    of_weights, of_results = map(of_config, twice(spoil))
    assert of_results == of_weights
    assert {code for code, (state, *_) in of_results.items() if state == "failed"} == failed


def test_results_of_an_older_version_are_not_judged_by_a_config_and_say_so(twice, tmp_path):
    twice(signs(0))
    file = tmp_path / "out.moegeom/run.json"
    run = json.loads(file.read_text("utf-8"))
    del run["gating"], run["quantisation"]
    for router in run["routers"]:
        del router["num_kept_groups"]
    file.write_text(json.dumps(run), "utf-8")
    verdict = gate(GateRequest(str(tmp_path / "out.moegeom"))).verdict
    assert {one[:2] for one in of_config(verdict).values()} == {("does not apply", OLDER)}
    assert "the config (these results do not hold it)" in verdict.unseen
