"""Every kind of file that moegeom opens: how a small one is written, and how a command uses it.

A kind that is missing here is not fuzzed: ``test_every_format_source_and_dialect_is_a_kind`` holds
this list against the registries of the package.
"""

import argparse
import dataclasses
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from safetensors.numpy import load_file, save_file

from benchmarks.synthetic import SyntheticModel, write_checkpoint, write_tokens
from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.remote.folder import RangeCache
from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.checks import run_checks
from moegeom.checks.baseline import read_baseline
from moegeom.checks.measured import measured_results
from moegeom.checks.profile_file import find_profile, read_profile
from moegeom.core.errors import MoeGeomError
from moegeom.core.tokens import TokenColumns
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.document.results import results_document
from moegeom.engine.loop import Progress, read_snapshot
from moegeom.engine.parts import MergedParts
from moegeom.geometry.attention_heads import SUMS, gating_figures
from moegeom.metrics import METRICS
from moegeom.pipeline import ScanRequest, lint, scan
from moegeom.results.reader import open_results
from moegeom.results.writer import ResultsWriter
from moegeom.router.load import load_routers
from moegeom.router.requested_family import read_family_file
from moegeom.studies.check.study import GateRequest, gate
from moegeom.studies.log_probs import log_probs
from moegeom.studies.track.record import TrackRequest
from moegeom.studies.track.study import track
from moegeom.studies.whatif.study import read_grid
from moegeom.tokens.attention_record import (
    NUM_BINS,
    AttentionRecord,
    LayerSums,
    read_attention_record,
    write_attention_record,
)
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.journal import recorded_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom.tokens.source import Company
from moegeom.tokens.traces.survey import FileJournal
from tests.unit.check.test_profiles import WHOLE
from tests.unit.tokens import test_alignment
from tests.unit.tokens.dialects import test_counts
from tests.unit.tokens.dialects.written import WRITERS, known, truth

Build = Callable[[Path], None]
Use = Callable[[Path, random.Random], None]


@dataclasses.dataclass(frozen=True)
class Kind:
    """``build`` writes files into a folder, those under ``targets`` are mutated in the language
    given, and ``use`` opens the folder as a command would.

    A kind has ``share`` of the mutations that others have, where its use is slow. What was built
    has a value, unless the kind ``is_refused`` as a whole. ``writes`` says that the use changes
    the folder.
    """

    name: str
    build: Build
    targets: Mapping[str, str]
    use: Use
    share: float = 1.0
    is_refused: bool = False
    writes: bool = False


MODEL = SyntheticModel("deepseek_v3", hidden=8, experts=8, top_k=2, layers=2)
CONFIG: dict[str, Any] = {
    "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 2, "hidden_size": 8,
}  # fmt: skip
ROUTERS = ("text/0", "text/1")


# ------------------------------------------------------------------------------------- checkpoints
def tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    named: dict[str, np.ndarray] = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        named[f"{at}.mlp.gate.weight"] = draw.standard_normal((4, 8), np.float32)
        named[f"{at}.post_attention_layernorm.weight"] = np.ones(8, np.float32)
    return named


def _torch_tensors() -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(values) for name, values in tensors().items()}


def _config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _safetensors(folder: Path) -> None:
    _config(folder)
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})


def _indexed(folder: Path) -> None:
    _config(folder)
    named = tensors()
    halves = [dict(list(named.items())[:2]), dict(list(named.items())[2:])]
    names = [f"model-{i + 1:05d}-of-00002.safetensors" for i in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    index = {n: name for name, half in zip(names, halves, strict=True) for n in half}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 320}, "weight_map": index})
    )


def _row_slices(folder: Path) -> None:
    _config(folder)
    for rank in range(2):
        half = {n: np.split(v, 2)[rank].copy() for n, v in tensors().items()}
        offsets = {
            n: {"saved_offsets": [rank * len(v)] + [0] * (v.ndim - 1)} for n, v in half.items()
        }
        save_file(
            half, folder / f"shard-{rank:05d}-model-00001-of-00002.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(offsets)},
        )  # fmt: skip


def _pytorch(folder: Path) -> None:
    import torch

    _config(folder)
    named = _torch_tensors()
    whole = torch.arange(64.0).reshape(8, 8)
    more = {
        "view": whole.T[1:3], "parameter": torch.nn.Parameter(whole), "tied": whole,
        "f8": torch.ones(4).to(torch.float8_e4m3fn), "half": torch.ones(2, dtype=torch.bfloat16),
        "list": [torch.ones(2), {"step": torch.tensor(3), "sparse": torch.eye(2).to_sparse()}],
        "args": argparse.Namespace(lr=0.1), "step": 7,
    }  # fmt: skip
    torch.save(named | more, folder / "pytorch_model.bin")


def _pytorch_index(folder: Path) -> None:
    import torch

    _config(folder)
    named = _torch_tensors()
    torch.save(named, folder / "a.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(named, "a.bin")})
    )


def _before_1_6(folder: Path) -> None:
    import torch

    _config(folder)
    torch.save(_torch_tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    _config(folder)
    dcp.save(_torch_tensors(), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _megatron(folder: Path) -> None:
    from tests.unit.checkpoint.test_dcp import write_megatron

    write_megatron(folder, is_stacked=True)


def _gguf(folder: Path) -> None:
    import gguf

    from tests.unit.checkpoint.gguf_file import moe_keys, write_gguf

    draw, tensors, types = np.random.default_rng(0), {}, {}
    for layer in range(2):
        rows = draw.standard_normal((4, 32), np.float32)
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = rows
        tensors[f"blk.{layer}.ffn_norm.weight"] = np.ones(32, np.float32)
    for dtype in ("Q8_0", "Q4_K", "MXFP4", "IQ2_S", "TQ1_0", "BF16"):
        types[name := f"blk.0.{dtype}.weight"] = kind = gguf.GGMLQuantizationType[dtype]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        tensors[name] = draw.integers(0, 256, (4, 2 * block_bytes), np.uint8)
    more = {"custom_alignment": 32, "head_count_kv": [1, 2, 3], "token_list": ["t"] * 300}
    keys = moe_keys(4, 32, layers=2) | more
    write_gguf(folder / "m.gguf", "olmoe", tensors, types, keys=keys, split_max_tensors=7)


def read_everything(folder: Path, draw: random.Random) -> None:
    """What ``routers`` and ``check`` do: the routers, then every tensor, then (1 of 16) the gate."""
    store = open_checkpoint(folder)
    for name in list(store.names())[:40]:
        with suppress(MoeGeomError):
            value, info = store.read(name), store.info(name)
            assert value.shape == info.shape
            assert len(store.read_bytes(name, 0, info.size_bytes)) == info.size_bytes
    load_routers(store)
    if draw.random() < 1 / 16:
        run_checks(measured_results(lint(str(folder))))


def judge_weights(folder: Path, draw: random.Random) -> None:
    """As above, the gate more often: it does what a config says."""
    load_routers(open_checkpoint(folder))
    if draw.random() < 1 / 3:
        run_checks(measured_results(lint(str(folder))))


def _model(folder: Path) -> None:
    write_checkpoint(folder / "model", MODEL)
    for file in (folder / "model").iterdir():
        file.rename(folder / file.name)
    (folder / "model").rmdir()


def judge_odd_weights(folder: Path, draw: random.Random) -> None:
    """The gate on sound files of unusual weights: few or equal or empty rows, extreme numbers."""
    experts, hidden = draw.choice((1, 2, 3, 8)), draw.choice((1, 2, 3, 8))
    numbers = np.random.default_rng(draw.randrange(2**32))
    named: dict[str, np.ndarray] = {}
    dtype = draw.choice(_FLOATS)
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, shape in shapes.items():
        values = numbers.standard_normal((2, *shape))
        if draw.random() < 0.5:
            values *= draw.choice((0.0, 1e-45, 1e-30, 1e-8, 1e8, 1e30, 1e38, 1e300))
        if draw.random() < 0.3:
            values[:, numbers.random(values.shape[1:]) < 0.5] = draw.choice(_ODD_NUMBERS)
        if draw.random() < 0.2:
            values[:] = values[:1, :1]
        with np.errstate(all="ignore"):
            for layer in range(2):
                named[f"model.layers.{layer}.{name}"] = values[layer].astype(dtype)
    save_file(named, folder / "model.safetensors")
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": hidden, "rms_norm_eps": 1e-6,
        "n_routed_experts": experts, "num_experts_per_tok": draw.randint(1, experts), "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    run_checks(measured_results(lint(str(folder))))


_FLOATS = (np.float32, np.float32, np.float16, np.float64, ml_dtypes.bfloat16)
_ODD_NUMBERS = (0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38, 1.0)


#: Characters that addresses may not hold, or that mean something in them; of other scripts, too.
_IN_URLS = ["é", "модель", "模型", "\u202e", "\ud800", "\0", "%", "%zz", "%00", "[", "]", ":", "@", "#", "?", " ", "\t",
            "\n", "/../", "//", "::", "xn--", "\x1b[31m", "a" * 3000, "99999", "-1", "\\", "'", '"', "..", "℀", "．"]  # fmt: skip

_URLS = (
    "http://127.0.0.1:9/model/model.safetensors", "https://user:secret@127.0.0.1:9/model?sig=1#x",
    "file:///nowhere/model.safetensors", "hf://owner/name@main/folder", "memory://bucket/model",
    "filecache::memory://bucket/model",
)  # fmt: skip


def _seed(folder: Path) -> None:
    (folder / "seed").write_text("0")


def open_url(folder: Path, draw: random.Random) -> None:
    """An address that a mutation spoils further; nothing listens at any of them."""
    url = draw.choice(_URLS)
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(url) + 1)
        url = url[:at] + draw.choice(_IN_URLS) + url[at + draw.choice((0, 0, 1, 4)) :]
    options = RemoteOptions(
        attempts=1,
        timeout_s=0.2,
        cache_folder=None,
        hub_endpoint="http://127.0.0.1:9",
        hub_token="",
    )
    list(open_checkpoint(url, options).names())


_KEPT = b"bytes of a server" * 20


def _cache(folder: Path) -> None:
    RangeCache(folder, 2000).put(("address", "tag", "0", "340"), _KEPT)
    RangeCache(folder, 2000).put(("address", "tag", "0", "8"), _KEPT[:8])


def use_cache(folder: Path, draw: random.Random) -> None:
    """What is kept is what was put there, or nothing; new content is kept all the same."""
    cache = RangeCache(folder, 100 if draw.random() < 0.1 else 2000)
    for size in (340, 8):
        key = ("address", "tag", "0", str(size))
        assert cache.get(key) in (None, _KEPT[:size])
        cache.put(key, _KEPT[:size])


# ------------------------------------------------------------------------------------------ tokens
def _arrays(stage: str = "router_input") -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    width = 8 if stage == "logits" else 12
    return {r: draw.standard_normal((40, width), np.float32) for r in ROUTERS}


def _npy(folder: Path) -> None:
    np.save(folder / "text.0.npy", _arrays()["text/0"])


def _dotted() -> dict[str, np.ndarray]:
    return {name.replace("/", "."): values for name, values in _arrays().items()}


def _npz(folder: Path) -> None:
    token = np.arange(40)
    np.savez(folder / "a.npz", **_dotted(), document=token // 10, position=token % 10)


def _pt(folder: Path) -> None:
    import torch

    named = {name: torch.from_numpy(values) for name, values in _dotted().items()}
    torch.save(named | {"document": torch.arange(40) // 10}, folder / "a.pt")


def _npz_deflated(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", **_dotted())


def _tokens_safetensors(folder: Path) -> None:
    save_file(_dotted(), folder / "a.safetensors")


def _tokens_parquet(folder: Path) -> None:
    columns = {name: pa.array(list(values)) for name, values in _arrays().items()}
    columns["document"] = pa.array(np.arange(40) // 10)
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=17)


def use_foreign(folder: Path, draw: random.Random) -> None:
    """The only file of the folder as tokens of a stage, read to its end."""
    path = next(folder.iterdir(), folder / "gone.npy")
    stage = draw.choice(("router_input", "router_input", "logits", "pre_norm"))
    read_source(open_tokens(path, stage, routers=ROUTERS))


def _columns(first: int, stop: int, length: int, domains: int = 0) -> TokenColumns:
    """Tokens of documents of one length; domains are -1, or as many more in turn."""
    token = np.arange(first, stop)
    return TokenColumns(
        document=token // length,
        position=(token % length).astype(np.int32),
        token_id=token.astype(np.int32),
        domain=(token % (domains + 1) - 1).astype(np.int16),
    )


def _recording(folder: Path) -> None:
    random_ = np.random.default_rng(0)
    with RecordingWriter(
        folder / "rec", "router_input", ROUTERS, checkpoint_name="tiny", fingerprint="sha256:1",
        engine="test 1.0", domains=("code", "prose"), dtype="float32",
    ) as writer:  # fmt: skip
        for first, stop in ((0, 25), (25, 40)):
            columns = _columns(first, stop, 10, 2)
            rows = stop - first
            values = {r: random_.standard_normal((rows, 12), np.float32) for r in ROUTERS}
            chosen = {r: random_.integers(0, 64, (rows, 3)).astype(np.int32) for r in ROUTERS}
            writer.append(columns, values, chosen)


def use_recording(folder: Path, draw: random.Random) -> None:
    read_source(open_tokens(folder / "rec", routers=ROUTERS))


def read_source(source: Any) -> None:
    facts = source.facts
    steps = [(0, facts.num_tokens // 2), (facts.num_tokens // 2, facts.num_tokens)]
    for start, stop in steps:
        source.read_columns(start, stop)
        for router in facts.routers:
            if facts.stage != "ids":
                values = source.read_values(router, start, stop)
                assert len(values) == stop - start
            if facts.has_chosen or facts.stage == "ids":
                source.read_chosen(router, start, stop)


def _log_probs(suffix: str) -> Build:
    def build(folder: Path) -> None:
        token = np.arange(40)
        scored = {"document": token // 10, "position": token % 10, "text": ["a,b"] * 40}
        table = pa.table(scored | {"logprob": -token / 7, "other_logprob": -token / 8})
        path = folder / f"scored.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        else:
            write = {"csv": csv.write_csv, "parquet": pq.write_table}[suffix]
            write(table, path)

    return build


def use_log_probs(folder: Path, draw: random.Random) -> None:
    """The only file of the folder as log-probabilities of recorded tokens."""
    path = next(folder.iterdir(), folder / "gone.csv")
    log_probs(path, _columns(0, 40, 10), np.arange(40) % 3)


def _trace(name: str) -> Build:
    return lambda folder: WRITERS[name].write(folder / WRITERS[name].file, truth().written)


def _counts(name: str) -> Build:
    file, write, num_steps = test_counts.WRITERS[name]
    return lambda folder: write(folder / file, test_counts.some_counts(num_steps))


def _open_trace(path: Path, **settings: Any) -> Any:
    return open_tokens(path, checkpoint_routers=known(), routers=("text/1", "text/2"), **settings)


def use_trace(dialect: str) -> Use:
    """A trace, its dialect found or named, and what it holds read to its end."""

    def use(folder: Path, draw: random.Random) -> None:
        path = next(folder.iterdir(), folder / "gone.json")
        asked = dialect if draw.random() < 0.3 else None
        source = _open_trace(path, dialect=asked)
        if source.facts.stage == "ids":
            read_source(source)

    return use


def _expert_map(folder: Path) -> None:
    """A trace of places, and a map."""
    WRITERS["vllm arrays"].write(folder / "routes.npz", truth().written)
    (folder / "map.json").write_text(test_alignment.listed(test_alignment.plan(0, 64)))


def use_expert_map(folder: Path, draw: random.Random) -> None:
    read_source(_open_trace(folder / "routes.npz", expert_map=str(folder / "map.json")))


_PLAN = {"texts": "5f3a", "settings": {"length": 128, "files": ["a.txt"]}}


def _attention(folder: Path) -> None:
    random = np.random.default_rng(0)
    sums = random.random((len(SUMS), 16, 2))
    counts = [random.integers(9, size=shape) for shape in ((16,), (16,), (2, 2, NUM_BINS))]
    floats = (sums, random.random((2, 2, 2, 3)), random.random(4))
    (folder / "rec").mkdir()
    tokens, queries, histogram = counts
    layer = LayerSums(
        "text/0", True, True, True, "", tokens, queries, floats[0], histogram, *floats[1:]
    )
    record = AttentionRecord("rec", "ckpt", "engine", 9, 3, (layer,))
    write_attention_record(folder / "rec", record)


def use_attention(folder: Path, draw: random.Random) -> None:
    for layer in read_attention_record(folder / "rec").layers:
        gating_figures(layer.by_name, layer.tokens, layer.queries)


def _unfinished_recording(folder: Path) -> None:
    writer = _writer(folder)
    writer.__enter__()
    for number in range(2):
        writer.append(*_shard(number))
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def _writer(folder: Path) -> RecordingWriter:
    return RecordingWriter(folder / "rec", "logits", ROUTERS, journal=_PLAN)


def _shard(number: int) -> tuple[TokenColumns, dict[str, np.ndarray]]:
    draw = np.random.default_rng(number)
    return _columns(6 * number, 6 * number + 6, 4), {
        r: draw.standard_normal((6, 5), np.float32) for r in ROUTERS
    }


def go_on_recording(folder: Path, draw: random.Random) -> None:
    """A capture that goes on where it was stopped, and the recording that it leaves."""
    recorded_tokens(folder / "rec", _PLAN)
    with _writer(folder) as writer:
        for number in range(writer.num_shards, 3):
            writer.append(*_shard(number))
    read_source(open_tokens(folder / "rec", routers=ROUTERS))


# ------------------------------------------------------------------- settings, results, what is kept
def _profile(folder: Path) -> None:
    (folder / "moegeom.toml").write_text(WHOLE)
    table = re.sub(r"(?m)^(\[+)", r"\1tool.moegeom.", WHOLE)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "x"\n\n[tool.moegeom]\n{table}')


def use_profile(folder: Path, draw: random.Random) -> None:
    """A profile by its name, or the one that the folder has."""
    read_profile(folder / draw.choice(("moegeom.toml", "pyproject.toml")))
    find_profile(folder)
    read_profile(folder / "pyproject.toml")


def _families(folder: Path) -> None:
    stored = resources.files("moegeom.router.families")
    for name in ("deepseek_v3", "ernie4_5_vl_moe", "inkling", "gguf_deepseek2"):
        (folder / f"{name}.toml").write_bytes(stored.joinpath(f"{name}.toml").read_bytes())


def use_families(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        read_family_file(path)


def _baseline(folder: Path) -> None:
    model = write_checkpoint(folder / "model", MODEL)
    gate(GateRequest(str(model), baseline=folder / "baseline.json", update_baseline=True))


def use_baseline(folder: Path, draw: random.Random) -> None:
    """A baseline, and (1 of 4) the gate that compares with it."""
    read_baseline(folder / "baseline.json")
    if draw.random() < 0.25:
        gate(GateRequest(str(folder / "model"), baseline=folder / "baseline.json"))


def _results_of_tokens(folder: Path) -> None:
    model = write_checkpoint(folder / "model", MODEL)
    fingerprint = load_routers(open_checkpoint(model)).fingerprint
    tokens = str(write_tokens(folder / "rec", MODEL, 64, fingerprint, 2))
    asked = ScanRequest(str(model), folder / "out", tokens=tokens, num_workers=1)
    scan(dataclasses.replace(asked, unverified=True, stale_inputs=True))
    shutil.rmtree(model)
    shutil.rmtree(tokens)


def _results(folder: Path) -> None:
    model = write_checkpoint(folder / "model", MODEL)
    scan(ScanRequest(str(model), folder / "out", num_workers=1))
    shutil.rmtree(model)


def use_results(folder: Path, draw: random.Random) -> None:
    """The report of a results folder, or the gate on it."""
    view = View(width=100, detail=draw.random() < 0.5)
    kind = draw.random()
    if kind < 0.2:
        gate(GateRequest(str(folder / "out")))
    else:
        names = [renderer.name for renderer in RENDERERS.all() if not renderer.of_verdicts]
        form = "table" if kind < 0.8 else draw.choice(names)
        render(results_document(open_results(folder / "out"), view), form, view)


def _metrics() -> list[Any]:
    return [metric for metric in METRICS.all() if metric.scope == "weights"]


_SCAN_PLAN = {"routers": ["text/0"], "rule": "x", "files": [["a", 1, 2]], "options": {"seed": 0}}


def _unfinished_results(folder: Path) -> None:
    from moegeom.engine.loop import write_snapshot

    model = write_checkpoint(folder / "model", MODEL)
    rows = lint(str(model))
    with ResultsWriter(folder / "out", _SCAN_PLAN, _metrics()) as writer:
        tables = {name: list(rows.rows(name)) for name in ("layers", "experts")}
        writer.add_part(
            "text/0", writer.new_part("text/0"), tables, {"reasons": {"load": "no tokens"}}
        )
        states = {"loads": {"counts": np.arange(8), "sums": np.ones((2, 3))}}
        write_snapshot(
            writer.snapshot_path("text/1", "as_stored"), Progress(3, 1200, (7,), 1, states)
        )


def go_on_scanning(folder: Path, draw: random.Random) -> None:
    """A scan that goes on where it was stopped: plan, finished parts, and the running snapshot."""
    writer = ResultsWriter(folder / "out", _SCAN_PLAN, _metrics())
    with writer:
        read_snapshot(writer.snapshot_path("text/1", "as_stored"))
        if writer.has_part("text/0"):
            writer.part_facts("text/0")
            for table in ("layers", "experts"):
                writer.gather(table, ["text/0"]).to_pylist()


def _kept_first_pass(folder: Path) -> None:
    (folder / "dump").mkdir()
    (folder / "files").mkdir()
    for number, request in enumerate(truth().written):
        WRITERS["vllm"].write(folder / "dump" / f"{number}.jsonl", [request])
    go_on_reading(folder, random.Random(0))


def go_on_reading(folder: Path, draw: random.Random) -> None:
    """A first pass over many files that goes on where it was stopped."""
    company = Company(FileJournal(folder / "files", "terms"))
    source = _open_trace(folder / "dump", company=company)
    source.read_chosen("text/1", 0, source.facts.num_tokens)


def read_many_traces(folder: Path, draw: random.Random) -> None:
    source = _open_trace(folder / "dump")
    source.read_chosen("text/1", 0, source.facts.num_tokens)


def _parts(folder: Path) -> None:
    """Two parts of a scan; the checkpoint and the tokens are gone, as on the machine that merges."""
    model = write_checkpoint(folder / "model", MODEL)
    fingerprint = load_routers(open_checkpoint(model)).fingerprint
    tokens = str(write_tokens(folder / "rec", MODEL, 2048, fingerprint, 2))
    for part in ("1/2", "2/2"):
        out = folder / f"part_{part[0]}"
        scan(ScanRequest(str(model), out, tokens=tokens, num_workers=1, part=part))
    shutil.rmtree(model)
    shutil.rmtree(tokens)


def _no_work(tiles: Sequence[int]) -> Progress:
    raise AssertionError("what is merged was folded before")


def use_parts(folder: Path, draw: random.Random) -> None:
    """What ``merge`` does before it opens the checkpoint, and every state that it adds up."""
    parts = MergedParts.of(sorted(folder.glob("part_*")))
    if isinstance(parts, MergedParts):
        for state in parts.parts[0].states:
            parts.fold(state.router, state.pass_name, (), 1, work=_no_work)


def _experts(folder: Path) -> None:
    """Layers with experts of their own and a shared one, some of them quantised with a scale."""
    _model(folder)
    draw, named = np.random.default_rng(1), load_file(folder / "model.safetensors")
    for layer, expert in itertools.product(range(2), (*range(8), None)):
        at = "shared_experts" if expert is None else f"experts.{expert}"
        for name, shape in (("gate", (4, 8)), ("up", (4, 8)), ("down", (8, 4))):
            key = f"model.layers.{layer}.mlp.{at}.{name}_proj.weight"
            named[key] = draw.standard_normal(shape, np.float32)
            if expert == 7:
                named[key] = named[key].astype(ml_dtypes.float8_e4m3fn)
                named[f"{key}_scale_inv"] = np.ones((1, 1), np.float32)
    save_file(named, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"moe_intermediate_size": 4, "n_shared_experts": 1}
    (folder / "config.json").write_text(json.dumps(config))


def judge_experts(folder: Path, draw: random.Random) -> None:
    gate(GateRequest(str(folder), experts=True))


def _adapter(folder: Path) -> None:
    """A sound model, and beside it an adapter of low rank on one of its routers."""
    _model(folder)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": "base", "r": 2, "lora_alpha": 4,
        "target_modules": ["gate"], "modules_to_save": None, "use_rslora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    at = "base_model.model.model.layers.1.mlp.gate"
    low = {f"{at}.lora_A.weight": (2, 8), f"{at}.lora_B.weight": (8, 2)}
    named = {name: np.ones(shape, np.float32) for name, shape in low.items()}
    save_file(named, folder / "adapter_model.safetensors")


def judge_adapter(folder: Path, draw: random.Random) -> None:
    gate(GateRequest(str(folder)))


def _series(folder: Path) -> None:
    """Two steps of a run and what ``track`` kept of them: results, and the series as it was told."""
    for step in (1, 2):
        write_checkpoint(folder / f"step_{step}", dataclasses.replace(MODEL, seed=step))
    use_series(folder, random.Random(0))


def use_series(folder: Path, draw: random.Random) -> None:
    track(TrackRequest((str(folder / "step_*"),), out=folder / "kept"))


def _grid(folder: Path) -> None:
    (folder / "grid.toml").write_text(
        "[smooth]\neps = [0.02, 0.05]\nb = [9, 50]\n\n[[temperature]]\ntau = [0.5, 2]\n"
    )


def use_grid(folder: Path, draw: random.Random) -> None:
    read_grid(folder / "grid.toml")


def _target(file: str) -> Mapping[str, str]:
    languages = {
        ".jsonl": "jsonl", ".json": "json", ".pt": "zip", ".npz": "zip", ".safetensors": "safetensors",
        ".gguf": "gguf", ".log": "text", ".csv": "text", ".bin": "bytes",
    }  # fmt: skip
    folders = {"trace": {"trace/*.jsonl": "jsonl"}, "iter_7": {"iter_7/*.parquet": "parquet"}}
    return folders[file] if file in folders else {file: languages[Path(file).suffix]}


_ALL = [
    Kind("safetensors", _safetensors, {"model.safetensors": "safetensors"}, read_everything),
    Kind("safetensors index", _indexed, {"*.index.json": "json"}, read_everything),
    Kind("row slices", _row_slices, {"*.safetensors": "safetensors"}, read_everything),
    Kind("config", _model, {"config.json": "json"}, judge_weights),
    Kind("weights", _model, {"model.safetensors": "safetensors"}, judge_weights),
    Kind("odd weights", _seed, {"seed": "bytes"}, judge_odd_weights),
    Kind("pytorch", _pytorch, {"*.bin": "zip"}, read_everything),
    Kind("pytorch index", _pytorch_index, {"*.json": "json", "*.bin": "zip"}, read_everything),
    Kind("pytorch before 1.6", _before_1_6, {"*.bin": "pickle"}, read_everything, is_refused=True),
    Kind("dcp metadata", _dcp, {".metadata": "pickle"}, read_everything),
    Kind("dcp pieces", _dcp, {"*.distcp": "bytes"}, read_everything),
    Kind("megatron", _megatron, {"common.pt": "zip", ".metadata": "pickle"}, read_everything),
    Kind("gguf", _gguf, {"*.gguf": "gguf"}, read_everything),
    Kind("url", _seed, {"seed": "bytes"}, open_url, is_refused=True),
    Kind("range cache", _cache, {"*/*": "bytes"}, use_cache, writes=True),
    Kind("npy", _npy, {"*": "npy"}, use_foreign),
    Kind("npz", _npz, {"*": "zip"}, use_foreign),
    Kind("tokens in pt", _pt, {"*": "zip"}, use_foreign),
    Kind("compressed npz", _npz_deflated, {"*": "zip"}, use_foreign),
    Kind("tokens in safetensors", _tokens_safetensors, {"*": "safetensors"}, use_foreign),
    Kind("tokens in parquet", _tokens_parquet, {"*": "parquet"}, use_foreign),
    Kind("recording facts", _recording, {"rec/recording.json": "json"}, use_recording),
    Kind(
        "recording", _recording, {"rec/*.parquet": "parquet", "rec/*.safetensors": "safetensors"},
        use_recording,
    ),
    Kind(
        "record of attention", _attention, {"rec/*.json": "json", "rec/*.safetensors": "safetensors"},
        use_attention,
    ),
    Kind("unfinished recording", _unfinished_recording, {"rec.partial/**/*": "jsonl"}, go_on_recording, writes=True),
    *(Kind(f"trace of {n}", _trace(n), _target(w.file), use_trace(w.dialect)) for n, w in WRITERS.items()),
    *(
        Kind(f"counts of {n}", _counts(n), _target(file), use_trace(test_counts.DIALECT[n]))
        for n, (file, _, _) in test_counts.WRITERS.items()
    ),
    Kind("expert map", _expert_map, {"map.json": "json"}, use_expert_map),
    Kind("log-probs in csv", _log_probs("csv"), {"*": "text"}, use_log_probs),
    Kind("log-probs in jsonl", _log_probs("jsonl"), {"*": "jsonl"}, use_log_probs),
    Kind("log-probs in parquet", _log_probs("parquet"), {"*": "parquet"}, use_log_probs),
    Kind("profile", _profile, {"*.toml": "toml"}, use_profile),
    Kind("family file", _families, {"*.toml": "toml"}, use_families),
    Kind("baseline", _baseline, {"baseline.json": "json"}, use_baseline),
    Kind("run.json", _results, {"out/run.json": "json"}, use_results),
    Kind("results tables", _results, {"out/*.parquet": "parquet"}, use_results, share=0.5),
    Kind(
        "results of tokens", _results_of_tokens, {"out/run.json": "json", "out/*.parquet": "parquet"},
        use_results, share=0.2,
    ),
    Kind("parts of a scan", _parts, {"part_*/part.json": "json", "part_*/*.npz": "zip"}, use_parts),
    Kind("experts", _experts, {"*.safetensors": "safetensors", "*.json": "json"}, judge_experts, share=0.3),
    Kind("adapter", _adapter, {"adapter_*.json": "json", "*.safetensors": "safetensors"}, judge_adapter, share=0.3),
    Kind(
        "series", _series, {"kept/**/*.json": "json", "kept/**/*.parquet": "parquet"},
        use_series, share=0.1, writes=True,
    ),
    Kind("grid of what-ifs", _grid, {"grid.toml": "toml"}, use_grid),
    Kind("unfinished results", _unfinished_results, {
        "out.partial/plan.json": "json", "out.partial/parts/*/facts.json": "json",
        "out.partial/parts/*/*.parquet": "parquet", "out.partial/snapshots/*": "zip",
    }, go_on_scanning, writes=True),
    Kind("kept first pass", _kept_first_pass, {"files/*": "zip"}, go_on_reading, writes=True),
    Kind("many traces", _kept_first_pass, {"dump/*": "jsonl"}, read_many_traces),
]  # fmt: skip

KINDS = {kind.name: kind for kind in _ALL}
