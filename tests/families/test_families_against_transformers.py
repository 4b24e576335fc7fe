"""Oracle: what the routers of transformers chose, for every family that it can build.

Tiny random models are saved in the hub's layout and in that of memory, in one file and in several,
in float32 and bfloat16, and as trainers wrap states; moegeom reads what was saved and routes what
the routers received. Routers of layers that predict further tokens are routers of the model itself,
stored a second time where such modules are. Where the choice does not follow from the input, what
the model chose is counted. What moegeom records is believed of models before any training, too.

Routers that project: the gates of tutel and torchscale, written in torch from their formulas. tutel:
``softmax(exp(min(t, log 100)) unit(P x + b) @ unit(S))``; torchscale leaves the first ``unit`` out.
Checkpoints hold the tensors under the names that the models save.
"""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RecordingError, RouterError
from moegeom.core.router import Router, RouterSet
from moegeom.core.tokens import SourceFacts, Stage
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare, unavailable
from moegeom.engine.task import Task
from moegeom.engine.trust import Trust, examine
from moegeom.geometry.rows import normed
from moegeom.geometry.selection import SCORES, Routing, mapped_logits, route
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import ScanRequest, scan
from moegeom.recorder import RouterRecorder
from moegeom.recorder.request import CaptureRequest
from moegeom.recorder.run import plan_capture
from moegeom.results.reader import Results, open_results
from moegeom.router.family import families, family_of, load_family
from moegeom.router.load import load_routers
from moegeom.tokens.sources.recorded import open_recording
from tests.array_source import ArraySource
from tests.by_day import by_day
from tests.columns import columns_of, recording_of
from tests.families import tiny_models
from tests.families.observed import FORWARD, VOCABULARY, Observed, observe
from tests.unit.tokens.dialects.written import Written, write_vllm


def routed(router: Router, inputs: np.ndarray, has_own_norm: bool) -> tuple[Routing, np.ndarray]:
    """The rule in float64, and the weights with the scales of experts."""
    y = inputs.astype(np.float64)
    if has_own_norm:
        assert router.norm is not None
        assert router.gain is not None
        y = normed(y, router.norm.kind, router.norm.eps, router.gain).astype(np.float64)
    logits = y @ router.weight.astype(np.float64).T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    shared_sum = None
    if router.shared_rows is not None:
        shared = mapped_logits(y @ router.shared_rows.T.astype(np.float64), router.rule.logit_map)
        shared_sum = SCORES[router.rule.score](shared).sum(axis=1)
    found = route(logits, router.rule, router.selection_bias, shared_sum)
    scale = 1.0 if router.expert_scale is None else router.expert_scale[found.chosen]
    return found, found.weights * scale


def by_place(routers: RouterSet) -> dict[tuple[str, int], Router]:
    return {
        (router.slot if router.slot == "attention" else router.stack, router.layer): router
        for router in routers.routers
    }


def assert_same_arrays(mine: Router, theirs: Router) -> None:
    for part in ("weight", "logit_bias", "selection_bias", "gain", "expert_scale"):
        np.testing.assert_array_equal(getattr(mine, part), getattr(theirs, part), part)


def assert_same_choices(routers: dict[tuple[str, int], Router], model: Any, name: str) -> None:
    """Sets and weights of every router that the model has and the file too, up to a tie or two."""
    num_ties = 0
    for observed in observe(model, name):
        # diffusion_gemma stores the routers that encoder and decoder share once
        stack = "decoder" if name == "diffusion_gemma" else observed.stack
        router = routers.get((stack, observed.layer))
        if router is None:
            assert observed.token_ids is not None  # looked up by token id: listed
            continue
        choice, weights = routed(router, observed.inputs, name in tiny_models.OWN_NORM)
        same = _is_same_choice(choice.chosen, observed.chosen)
        is_tied = np.minimum(choice.margin, choice.group_margin) < 1e-5
        num_ties += int((is_tied & ~same).sum())
        np.testing.assert_array_equal(same | is_tied, True, err_msg=f"{name} {observed.module}")
        # a token that an expert dropped has its weights made from what is left
        same &= (observed.chosen >= 0).all(axis=1)
        mine = _dense(choice.chosen, weights, router.num_experts)
        theirs = _dense(observed.chosen, observed.weights, router.num_experts)
        np.testing.assert_allclose(mine[same], theirs[same], rtol=1e-5, atol=1e-6)
    assert num_ties <= 2


@pytest.mark.parametrize("name", tiny_models.BY_DAY)
def test_chosen_sets_and_weights_are_those_of_the_model(name):
    assert_same_choices(by_place(tiny_models.read(name)), tiny_models.model_of(name), name)


def _is_same_choice(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Equal sets, but for experts that dropped the token because they were full (-1)."""
    is_mine = (theirs[:, :, None] == mine[:, None, :]).any(axis=2)
    return (is_mine | (theirs < 0)).all(axis=1) & (theirs.shape[1] == mine.shape[1])


def _dense(chosen: np.ndarray, values: np.ndarray, num_experts: int) -> np.ndarray:
    dense = np.zeros((len(chosen), num_experts + 1))  # the last column takes what was dropped
    np.put_along_axis(dense, chosen.astype(np.int64), values.astype(np.float64), axis=1)
    return dense[:, :num_experts]


#: By what the library writes otherwise on the hub than in memory.
LAYOUTS = {
    "the same": "olmoe",
    "experts one by one": "mixtral",
    "a bias kept in float32": "deepseek_v3",
    "tables beside routers": "deepseek_v4",
    "biases of logits": "gpt_oss",
    "experts in the rows of one matrix": "dbrx",
    "two routers in a layer": "jetmoe",
    "encoder and decoder": "switch_transformers",
    "under a prefix": "llava__mixtral",
    "layers of three kinds": "nemotron_h",
    "a scale of experts": "gemma4_text",
}


@pytest.mark.parametrize("name", by_day(tiny_models.LOADED, LAYOUTS))
def test_every_layout_and_dtype_holds_the_same_routers(name, tmp_path):
    """Hub names in float32, names in memory in shards, hub names in bfloat16."""
    tiny_models.model_of(name).save_pretrained(
        tmp_path / "shards", save_original_format=False, max_shard_size="40KB"
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    rounded = copy.deepcopy(tiny_models.model_of(name))
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    rounded.save_pretrained(tmp_path / "bfloat16")
    hub, shards, half = (
        by_place(routers)
        for routers in (
            tiny_models.read(name),
            *(load_routers(open_checkpoint(tmp_path / way)) for way in ("shards", "bfloat16")),
        )
    )
    assert hub.keys() == shards.keys() == half.keys()
    for key, router in hub.items():
        assert router.rule == shards[key].rule == half[key].rule
        assert_same_arrays(shards[key], router)
        short = torch.from_numpy(router.weight.copy()).bfloat16().float().numpy()
        is_kept = np.array_equal(half[key].weight, router.weight)  # kept in float32 by the family
        assert is_kept or np.array_equal(half[key].weight, short)


State = dict[str, torch.Tensor]


#: What trainers write: a dictionary around the state, or a module around the model.
WRITERS: dict[str, Callable[[State, Path], None]] = {
    "model in DCP": lambda state, folder: dcp.save(
        {"model": state, "step": 7}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True
    ),
    "model in .pt": lambda state, to: torch.save({"model": state, "step": 7}, to / "a.pt"),
    "state_dict in .pt": lambda state, to: torch.save({"state_dict": state}, to / "a.pt"),
    "Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
    "model in Lightning": lambda state, to: torch.save(
        {"state_dict": {f"model.model.{name}": t for name, t in state.items()}}, to / "a.ckpt"
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("written", "name"),
    by_day(
        [(written, name) for written in WRITERS for name in tiny_models.LOADED],
        {
            "a prefix of the model": ("model in DCP", "olmoe"),
            "biases": ("model in .pt", "deepseek_v3"),
            "no prefix": ("state_dict in .pt", "openai_privacy_filter"),
            "encoder and decoder": ("Lightning", "switch_transformers"),
            "a prefix of a part": ("model in Lightning", "llava__mixtral"),
        },
    ),
)
def test_a_wrapped_state_has_routers_and_fingerprint_of_the_bare_one(written, name, tmp_path):
    bare, folder = tiny_models.read(name), tiny_models.saved(name)
    shutil.copy(folder / "config.json", tmp_path)
    state = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    WRITERS[written](state, tmp_path)
    wrapped = load_routers(open_checkpoint(tmp_path))
    assert wrapped.fingerprint == bare.fingerprint
    assert wrapped.num_expected == bare.num_expected
    assert len(wrapped.skipped) == len(bare.skipped)
    for mine, theirs in zip(wrapped.routers, bare.routers, strict=True):
        assert (mine.name, mine.rule) == (theirs.name, theirs.rule)
        assert_same_arrays(mine, theirs)


@pytest.mark.parametrize("name", sorted(tiny_models.LISTED))
def test_routers_that_are_no_function_of_their_input_are_listed(name):
    with pytest.raises(RouterError, match="cannot be measured: it"):
        tiny_models.read(name)


def test_layers_that_look_up_are_listed_and_every_family_is_held():
    (skipped,) = tiny_models.read("deepseek_v4").skipped
    assert skipped.reason.startswith("its experts are looked up by token id in '")
    assert (
        len(tiny_models.read("deepseek_v4").routers) == tiny_models.read("deepseek_v4").num_expected
    )
    of_library = {n for n in families() if load_family(n).source.startswith("transformers")}
    assert of_library - families_of(tiny_models.NAMES) == set()


def families_of(names: Iterable[str]) -> set[str]:
    """Families that these models are of, their parts included."""
    types = set().union(*map(_types_of, names))
    return {family.name for kind in types if (family := family_of(kind)) is not None}


@cache
def _types_of(name: str) -> set[str]:
    return _types(tiny_models.tiny_config(name).to_dict())


def _types(config: Any) -> set[str]:
    """The type of a config and those of its parts, which are held against the whole."""
    if not isinstance(config, dict):
        return set()
    own = {config["model_type"]} if config.get("model_type") else set()
    return own.union(*map(_types, config.values()))


#: Where the released checkpoints, or the patterns that transformers ignores, have the modules.
MODULES = {
    **dict.fromkeys(("exaone_moe", "mellum", "minimax_m3_vl", "qwen3_5_moe"), "mtp.layers.0."),
    **dict.fromkeys(("qwen3_next", "qwen4_exp"), "mtp.layers.0."),
    **dict.fromkeys(("dots3_note", "mimo_v2_flash"), "model.mtp.layers.0."),
    "deepseek_v4": "mtp.0.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "hy_v4": "model.mtp_layers.0.",
    "inkling": "model.mtp.layers.0.transformer_block.",
    "longcat_flash": "model.mtp.layers.0.transformer_layer.",
    "nemo_speechlm": "llm.mtp.layers.1.",
    "nemotron_h": "mtp.layers.1.",
    "nemotron_h_omni": "language_model.mtp.layers.1.",
}

BY_PLACE = {
    "beside the layers": "deepseek_v4",
    "below the model": "ernie4_5_moe",
    "a part of a module": "longcat_flash",
    "a later layer, of a part": "nemo_speechlm",
    "a norm in front": "qwen3_next",
}


def _with_module(name: str, folder: Path, **others: torch.Tensor | None) -> Router:
    """The router of a layer that is there as a module, too, with other tensors (None: without)."""
    shutil.copytree(tiny_models.saved(name), folder, dirs_exist_ok=True)
    router = [r for r in tiny_models.read(name).routers if r.stack == "text"][-1]
    head, layer, _ = router.provenance.tensors[0].rpartition(f"layers.{router.layer}.")
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = dict(load_file(file))
    tensors |= {
        key.replace(head + layer, MODULES[name]): tensor.clone()
        for key, tensor in load_file(file).items()
        if key.startswith(head + layer)
    }
    tensors |= {MODULES[name] + key: tensor for key, tensor in others.items()}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    return router


def _names(routers: RouterSet) -> list[str]:
    return [router.name for router in routers.routers]


@pytest.mark.parametrize("name", by_day(MODULES, BY_PLACE))
def test_a_module_holds_the_router_that_its_layer_has(name, tmp_path):
    before, own = tiny_models.read(name), _with_module(name, tmp_path)
    after = load_routers(open_checkpoint(tmp_path))
    number = int(re.findall("[0-9]+", MODULES[name])[0])
    (module,) = [r for r in after.routers if r.stack == "mtp"]
    assert (module.name, module.layer) == (f"mtp/{number}", number)
    assert module.rule == own.rule
    for part in ("weight", "gain", "norm_bias", "logit_bias", "selection_bias", "expert_scale"):
        np.testing.assert_array_equal(getattr(module, part), getattr(own, part), part)
    if own.norm is not None:
        assert module.norm is not None
        assert replace(module.norm, tensor=own.norm.tensor) == own.norm
    assert [name for name in _names(after) if name != module.name] == _names(before)
    assert after.skipped == before.skipped
    assert after.layer_notes == before.layer_notes
    if before.num_expected is not None:
        assert after.num_expected == before.num_expected + 1


def test_a_module_without_its_norm_is_listed_and_the_model_is_loaded(tmp_path):
    _with_module("qwen3_next", tmp_path, **{"post_attention_layernorm.weight": None})
    after = load_routers(open_checkpoint(tmp_path))
    assert _names(after) == _names(tiny_models.read("qwen3_next"))
    (skipped,) = after.skipped
    assert skipped.tensor == "mtp.layers.0.mlp.gate.weight"
    assert skipped.reason == (
        "router mtp/0: tensor 'mtp.layers.0.post_attention_layernorm.weight' is missing; "
        "routers of family qwen3_next have a norm in front"
    )


def test_layers_chooses_modules_by_their_number_and_a_dense_one_is_no_router(tmp_path):
    _with_module("qwen3_next", tmp_path)
    chosen = load_routers(open_checkpoint(tmp_path), layers="0")
    assert _names(chosen) == ["text/0", "mtp/0"]
    assert chosen.num_expected == 2
    dense = {"mlp.gate.weight": None, "mlp.gate_proj.weight": torch.ones(4, 64)}
    _with_module("qwen3_next", tmp_path, **dense)
    loaded = load_routers(open_checkpoint(tmp_path))
    assert {r.stack for r in loaded.routers} == {"text"}
    assert loaded.skipped == ()


def test_every_family_with_modules_is_tested():
    named = {n for n in families() if any(stack.mtp_layers for stack in load_family(n).stacks)}
    # the text type of dots3_note has the modules of the whole
    assert named == {*MODULES, "dots3_note_text"}


#: Product keys, a state across layers, a table of experts by token, experts drawn by lot.
CHOOSING_OTHERWISE = ["doge", "zaya", "deepseek_v4", "nllb_moe"]

LENGTH = 16


def _checkpoint(name: str, folder: Path) -> Path:
    shutil.copytree(tiny_models.saved(name), folder / "model")
    if name == "nllb_moe":
        file = folder / "model/config.json"
        policy = {"second_expert_policy": "sampling"}
        file.write_text(json.dumps(json.loads(file.read_text()) | policy))
    return folder / "model"


@cache
def _seen(name: str) -> tuple[Observed, ...]:
    return observe(tiny_models.model_of(name), name)


def _scanned(name: str, folder: Path, tokens: Path) -> Results:
    checkpoint = str(_checkpoint(name, folder))
    return open_results(scan(ScanRequest(checkpoint, folder / "out", tokens=str(tokens))))


def _assert_slots(results: Results, router: Observed, chosen: np.ndarray) -> np.ndarray:
    """Each expert has the slots that choices count; those are the answer."""
    key = f"{router.stack}/{router.layer}"
    rows = [r for r in results.rows("experts") if (r["router"], r["population"]) == (key, "all")]
    slots = [row["num_slots"] for row in sorted(rows, key=lambda row: row["expert"])]
    expected = np.bincount(chosen.ravel(), minlength=len(rows))
    np.testing.assert_array_equal(slots, expected)
    return expected


def _recording(seen: tuple[Observed, ...], out: Path, stage: Stage = "ids") -> Path:
    tokens = min(len(router.chosen) for router in seen)
    columns = columns_of(np.arange(tokens) // LENGTH, 0, 0)
    by_name = {f"{router.stack}/{router.layer}": router for router in seen}
    values = {} if stage == "ids" else {n: r.inputs[:tokens] for n, r in by_name.items()}
    chosen = {n: r.chosen[:tokens].astype(np.int32) for n, r in by_name.items()}
    tensors = (None, chosen) if stage == "ids" else (values, None)
    return recording_of(out, stage, columns, *tensors, domains=("text",))


@pytest.mark.parametrize("name", CHOOSING_OTHERWISE)
def test_loads_and_pairs_of_listed_routers_are_those_that_were_recorded(name, tmp_path):
    seen = _seen(name)
    results = _scanned(name, tmp_path, _recording(seen, tmp_path / "rec"))
    layers = {row["router"]: row for row in results.rows("layers") if row["population"] == "all"}
    assert len(layers) == len(seen)
    for router in seen:
        slots = _assert_slots(results, router, router.chosen)
        share = slots[slots > 0] / slots.sum()
        row = layers[f"{router.stack}/{router.layer}"]
        entropy = -(share * np.log(share)).sum()
        np.testing.assert_allclose(np.log(row["effective_experts"]), entropy)
        sets = {tuple(sorted(chosen)) for chosen in router.chosen.tolist()}
        assert row["num_expert_sets"] == len(sets)
        # weights of loaded routers are measured, and of listed ones nothing but the choices
        is_loaded = name == "deepseek_v4" and router.layer > 0
        for figure in ("margin_p50", "gram_score_raw", "num_zero_rows"):
            assert is_loaded or row.get(figure) is None
        assert not is_loaded or row["num_zero_rows"] is not None


def test_what_capture_refuses_is_counted_from_what_its_refusal_proposes(tmp_path):
    """A trace of an engine, which lacks the last token; ids of one's own loop are tested above."""
    seen = _seen("zaya")
    (tmp_path / "a.txt").write_text("ab")
    text = (str(tmp_path / "a.txt"),)
    request = CaptureRequest(tiny_models.saved("zaya"), text, tmp_path / "rec")
    with pytest.raises(RouterError, match="cannot be measured: it") as caught:
        plan_capture(request)
    for way in ("--tokens REC, a trace of an engine", "RecordingWriter", "capture does not record"):
        assert way in caught.value.hint
    ids = np.stack([router.chosen[:LENGTH] for router in seen], axis=1)
    trace = tmp_path / "trace.jsonl"
    write_vllm(trace, [Written("a", ids[:-1], np.arange(LENGTH, dtype=np.int64), 5)])
    results = _scanned("zaya", tmp_path, trace)
    for number, router in enumerate(seen):
        _assert_slots(results, router, ids[:-1, number])


def test_a_recording_that_leaves_a_listed_router_out_is_scanned_without_it(tmp_path):
    recording = _recording(_seen("deepseek_v4")[1:], tmp_path / "rec")
    run = _scanned("deepseek_v4", tmp_path, recording).run
    assert [router["name"] for router in run["routers"]] == ["text/1", "text/2", "text/3"]
    assert run["checkpoint"]["num_routers"] == run["checkpoint"]["num_expected"] == 3


def test_inputs_without_choices_do_not_measure_a_listed_router(tmp_path):
    recording = _recording(_seen("doge"), tmp_path / "rec", "router_input")
    with pytest.raises(RecordingError, match="does not say what router text/0 chose") as caught:
        _scanned("doge", tmp_path, recording)
    assert "stage ids" in caught.value.hint


def test_without_tokens_a_hint_leads_to_choices_and_weights_tell_the_checkpoint(tmp_path):
    with pytest.raises(RouterError, match="cannot be measured") as caught:
        scan(ScanRequest(str(tiny_models.saved("zaya")), tmp_path / "out"))
    assert "moegeom scan CKPT --tokens REC" in caught.value.hint
    prints = set()
    for name in ("doge", "zaya"):
        listed = load_routers(open_checkpoint(tiny_models.saved(name)), with_listed=True)
        assert all(router.listed and router.hidden_size == 0 for router in listed.routers)
        prints.add(listed.fingerprint)
    assert len(prints) == 2


STRICT = {"stale_inputs": False, "unverified": False}

#: Families whose routers are heard in a run over tokens.
RUN = [
    name
    for name in tiny_models.LOADED
    if "__" not in name
    and FORWARD.get(name, True)
    and name not in tiny_models.OWN_NORM | {"qwen3_omni_moe"}
]


def _fresh(name: str) -> Any:
    with tiny_models.repeatable(name):
        return getattr(transformers, tiny_models.FAMILIES[name].model)(
            tiny_models.tiny_config(name)
        ).eval()


def _believed(name: str, model: Any, folder: Path) -> Trust:
    model.save_pretrained(folder / "model")
    recorder = RouterRecorder(model, folder / "rec", checkpoint=folder / "model", keep="hidden")
    with tiny_models.repeatable(name), recorder:
        ids = torch.randint(3, VOCABULARY, (2, 64))
        recorder.tokens(ids, documents=[0, 1])
        if model.config.is_encoder_decoder:
            model(input_ids=ids, decoder_input_ids=ids)
        else:
            model(input_ids=ids, use_cache=False)
    loaded = load_routers(open_checkpoint(folder / "model"))
    source = open_recording(folder / "rec")
    heard = [prepare(r) for r in loaded.routers if r.name in source.facts.routers]
    assert heard
    return examine(heard, source, loaded.fingerprint, load_kernels("cpu"), STRICT)


CASES = [(name, make) for name in RUN for make in (_fresh, tiny_models.model_of)]


@pytest.mark.parametrize(
    ("name", "make"),
    by_day(
        CASES,
        {
            "RMS": ("deepseek_v3", _fresh),
            "RMS with gains": ("mixtral", tiny_models.model_of),
            "layer norm": ("dbrx", _fresh),
            "layer norm with gains": ("phimoe", tiny_models.model_of),
            "gains about 0": ("qwen3_next", _fresh),
            "no norm in front": ("flex_olmo", _fresh),
            "encoder and decoder": ("switch_transformers", _fresh),
        },
    ),
)
def test_an_own_recording_is_believed(name, make, tmp_path):
    trust = _believed(name, make(name), tmp_path)
    assert trust.fingerprint == "matches"
    assert trust.share_reproduced is None or trust.share_reproduced >= 0.99


def test_an_own_recording_whose_norms_feel_their_eps_is_believed(tmp_path):
    """Embeddings half as large as hy_v3 makes them: no input of its first router has length 1."""
    model = _fresh("hy_v3")
    model.get_input_embeddings().weight.data.mul_(0.5)
    trust = _believed("hy_v3", model, tmp_path)
    assert trust.rms_median is not None
    np.testing.assert_array_less(trust.rms_median, 0.98)
    assert trust.overridden == ()


# -------------------------------------------------------------------------------- projected routers
EXPERTS, HIDDEN, PROJECTED, TOKENS = 6, 24, 5, 300

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Gate:
    """A family, where it keeps its gate, its config, and what it makes of inputs: the logits."""

    config: dict[str, Any]
    stack: str
    at: str
    parts: dict[str, tuple[int, ...]]
    logits: Callable[[Tensors, torch.Tensor], torch.Tensor]
    beside: dict[str, int]
    top_k: int = 1

    def renormalises(self) -> bool:
        return self.top_k > 1 and self.config.get("normalize_gate", True)


def _tutel(gate: Tensors, x: torch.Tensor) -> torch.Tensor:
    projected = x @ gate["cosine_projector.weight"].T + gate["cosine_projector.bias"]
    cosine = normalize(projected, dim=1) @ normalize(gate["sim_matrix"], dim=0)
    return cosine * torch.clamp(gate["temperature"], max=math.log(100.0)).exp()


def _torchscale(gate: Tensors, x: torch.Tensor) -> torch.Tensor:
    rows = gate["wg"] * (1.5 / gate["wg"].norm(dim=1, keepdim=True))
    return (x @ gate["wg_reduction.weight"].T) @ normalize(rows, dim=1, eps=1e-4).T


_TUTEL = {
    "cosine_projector.weight": (PROJECTED, HIDDEN),
    "cosine_projector.bias": (PROJECTED,),
    "sim_matrix": (PROJECTED, EXPERTS),
    "temperature": (1,),
}
_TORCHSCALE = {"wg_reduction.weight": (PROJECTED, HIDDEN), "wg": (EXPERTS, PROJECTED)}

_GMOE = Gate(
    {"model_type": "gmoe", "num_experts": EXPERTS, "embed_dim": HIDDEN},
    "vision", "model.blocks.8.mlp.gates.0.", _TUTEL, _tutel,
    {"model.blocks.8.norm2.weight": HIDDEN, "model.blocks.8.norm2.bias": HIDDEN},
)  # fmt: skip
_SWIN = Gate(
    {"model_type": "swin_moe", "MODEL": {"SWIN_MOE": {"TOP_VALUE": 1}}},
    "stage2", "layers.2.blocks.3.mlp._moe_layer.gates.0.", _TUTEL, _tutel,
    {"layers.2.blocks.3.norm2.weight": HIDDEN, "layers.2.blocks.3.norm2.bias": HIDDEN},
)  # fmt: skip
_XMOE = Gate(
    {"use_xmoe": True, "moe_expert_count": EXPERTS, "moe_freq": 2, "decoder_layers": 2,
     "decoder_embed_dim": HIDDEN, "moe_top1_expert": True},
    "decoder", "decoder.layers.1.moe_layer.gate.", _TORCHSCALE, _torchscale, {},
)  # fmt: skip

GATES = {
    "gmoe": _GMOE,
    "gmoe, two experts": replace(_GMOE, config=_GMOE.config | {"top_k": 2}, top_k=2),
    "gmoe, two experts, weights as they are": replace(
        _GMOE, config=_GMOE.config | {"top_k": 2, "normalize_gate": False}, top_k=2
    ),
    "swin_moe": _SWIN,
    "xmoe": _XMOE,
    "xmoe, two experts": replace(_XMOE, config=_XMOE.config | {"moe_top1_expert": False}, top_k=2),
}


class _Recorded(ArraySource):
    def __init__(self, router: Router, stage: Stage, values: np.ndarray) -> None:
        super().__init__({router.name: values})
        self._stage: Stage = stage

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, stage=self._stage)


def _measured(router: Router, stage: Stage, values: np.ndarray) -> TokenBatch:
    source = _Recorded(router, stage, values)
    return LazyBatch(Task(prepare(router), source, load_kernels("cpu")), 0, len(values))


def _tensors(gate: Gate, temperature: float = 2.0) -> Tensors:
    draw = torch.Generator().manual_seed(1)
    made = {part: torch.randn(shape, generator=draw) for part, shape in gate.parts.items()}
    return made | ({"temperature": torch.tensor([temperature])} if "temperature" in made else {})


def _loaded(gate: Gate, tensors: Tensors, folder: Path) -> Router:
    stored = {gate.at + part: tensor for part, tensor in tensors.items()}
    stored |= {name: torch.ones(size) for name, size in gate.beside.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(gate.config))
    (router,) = load_routers(open_checkpoint(folder)).routers
    return router


def _inputs() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def _exact(gate: Gate, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    return gate.logits({part: tensor.double() for part, tensor in tensors.items()}, x.double())


def _case(name: str, folder: Path, temperature: float = 2.0, size: float = 1.0) -> tuple[Any, ...]:
    gate, x = GATES[name], _inputs() * size
    tensors = _tensors(gate, temperature)
    router = _loaded(gate, tensors, folder)
    return gate, tensors, x, router, _measured(router, "router_input", x.numpy())


@pytest.mark.parametrize("name", GATES)
def test_choices_weights_margin_entropy_and_z_are_those_of_the_gate(name, tmp_path):
    gate, tensors, x, router, batch = _case(name, tmp_path)
    k = gate.top_k
    assert (router.stack, router.rule.top_k, router.rule.is_affine) == (gate.stack, k, True)
    weights, chosen = torch.softmax(gate.logits(tensors, x), dim=1).topk(k)
    if gate.renormalises():
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.1920929e-07)
    is_clear = batch.margin > batch.float_bound
    assert is_clear.mean() > 0.98
    np.testing.assert_array_equal(batch.chosen[is_clear], chosen.numpy()[is_clear])
    np.testing.assert_allclose(batch.weights[is_clear], weights.numpy()[is_clear], rtol=1e-5)
    logits = _exact(gate, tensors, x)
    ordered = logits.sort(dim=1, descending=True).values
    log_p = torch.log_softmax(logits, dim=1)
    for mine, theirs in (
        (batch.margin, ordered[:, k - 1] - ordered[:, k]),
        (batch.selection, logits),
        (batch.log_sum_exp, torch.logsumexp(logits, dim=1)),
        (batch.entropy, -(log_p.exp() * log_p).sum(dim=1)),
    ):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["gmoe", "gmoe, two experts", "xmoe"])
def test_the_choice_of_the_gate_changes_at_the_distance_and_not_before(name, tmp_path):
    gate, tensors, x, router, batch = _case(name, tmp_path)
    rows = router.weight[batch.pair[:, 1]] - router.weight[batch.pair[:, 0]]
    direction = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    sets = []
    for share in (0.0, 0.999, 1.001):
        moved = x.double().numpy() + share * batch.distance[:, None] * direction
        chosen = _exact(gate, tensors, torch.from_numpy(moved)).topk(gate.top_k).indices
        sets.append(np.sort(chosen.numpy(), axis=1))
    np.testing.assert_array_equal(sets[0], sets[1])
    assert (sets[0] != sets[2]).any(axis=1).all()


def test_a_float32_engine_errs_within_the_bound_and_the_temperature_is_clamped(tmp_path):
    gate, tensors, x, _, batch = _case("gmoe", tmp_path, size=30.0)
    error = (gate.logits(tensors, x).double() - _exact(gate, tensors, x)).abs().amax(dim=1)
    assert (error.numpy() < batch.float_bound).all()
    gate, tensors, x, router, batch = _case("gmoe", tmp_path, temperature=7.0)
    np.testing.assert_allclose(router.projection.scale, 100.0)
    np.testing.assert_allclose(batch.selection, _exact(gate, tensors, x).numpy(), rtol=1e-6)


def test_logits_of_an_engine_tell_weights_and_no_distance(tmp_path):
    gate, tensors, x, router, whole = _case("gmoe, two experts", tmp_path)
    logits = gate.logits(tensors, x).numpy()
    batch = _measured(router, "logits", logits)
    np.testing.assert_allclose(batch.weights, whole.weights, rtol=1e-5)
    np.testing.assert_allclose(batch.margin, whole.margin, rtol=1e-3, atol=1e-5)
    assert batch.distance is None
    facts = _Recorded(router, "logits", logits).facts
    assert unavailable(router, facts)["distance"] == (
        "logits of this rule are divided by the length of the projected input, which needs "
        "recorded router inputs"
    )


def test_a_projection_that_does_not_fit_the_gate_or_the_memory_is_refused(tmp_path):
    gate, weight = GATES["gmoe"], "cosine_projector.weight"
    for spoilt, sentence in (
        ({weight: torch.ones(PROJECTED + 1, HIDDEN)}, "expected (5, hidden)"),
        ({weight: torch.ones(PROJECTED)}, "has shape (5,)"),
        ({"cosine_projector.bias": torch.ones(3)}, "its router needs (5,)"),
        ({"temperature": torch.ones(2)}, "its router needs (1,)"),
        ({"temperature": None}, "gates.0.temperature' is missing"),
        ({weight: torch.ones(PROJECTED, 25)}, "config.json says hidden size 24"),
    ):
        tensors = _tensors(gate) | spoilt
        with pytest.raises(RouterError) as caught:
            _loaded(gate, {k: v for k, v in tensors.items() if v is not None}, tmp_path)
        assert "tensor 'model.blocks.8.mlp.gates.0." in caught.value.message
        assert sentence in caught.value.message
    wide, bias = torch.zeros(1, 1 << 17), torch.zeros(1)
    tensors = _tensors(gate) | {weight: wide, "cosine_projector.bias": bias, "sim_matrix": wide + 0}
    with pytest.raises(RouterError, match="too large for a router of 131072 experts"):
        _loaded(replace(gate, config={"model_type": "gmoe"}), tensors, tmp_path)


@pytest.mark.parametrize("part", ["temperature", "cosine_projector.weight", "sim_matrix"])
def test_numbers_that_are_not_finite_are_refused_when_measured(part, tmp_path):
    tensors = _tensors(GATES["gmoe"])
    router = _loaded(GATES["gmoe"], tensors | {part: tensors[part] * math.nan}, tmp_path)
    with pytest.raises(RouterError):
        prepare(router)
