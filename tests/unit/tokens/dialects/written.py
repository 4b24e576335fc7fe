"""Traces as engines write them, by their documented layouts (versions stand at the writers)."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.files import TokenFiles
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.alignment import Reference, TraceRows, rows_of
from moegeom.tokens.traces.source import trace_source
from moegeom.tokens.traces.survey import FileOf, first_pass
from moegeom.tokens.traces.trace import Dialect, Trace
from tests.columns import columns_of

#: Layer 0 is dense; three layers of 64 experts choose 4.
FIRST, NUM_LAYERS, EXPERTS, TOP_K = 1, 4, 64, 4
LENGTHS = (20, 31, 17)


def known(num_experts: int = EXPERTS, top_k: int = TOP_K) -> tuple[KnownRouter, ...]:
    return tuple(
        KnownRouter(f"text/{layer}", "text", layer, num_experts, top_k)
        for layer in range(FIRST, NUM_LAYERS)
    )


NAMES = tuple(router.name for router in known())


def opened(path: Path | str | TokenFiles, dialect: str | None = None, **more: Any) -> TokenSource:
    return open_tokens(
        path,
        routers=NAMES,
        checkpoint_routers=more.pop("checkpoint_routers", known()),
        dialect=dialect,
        **more,
    )


def refuse(
    words: str, path: Path | str | TokenFiles, dialect: str | None = None, **more: Any
) -> None:
    """Nothing is opened, and these words say why."""
    with pytest.raises(RecordingError, match=words):
        opened(path, dialect, **more)


def chosen(source: TokenSource) -> np.ndarray:
    return np.stack([source.read_chosen(n, 0, source.facts.num_tokens) for n in NAMES], axis=1)


def rows_in_memory(trace: Trace) -> TraceRows:
    of_memory = Dialect("memory", "", "", recognises=lambda path: False, read=lambda path: trace)
    found = first_pass([FileOf(Path(__file__), of_memory)], known(), trace.where)
    names = [router.name for router in known()]
    return rows_of(trace_source(trace.where, found, names), known())


@dataclass(frozen=True)
class Written:
    """One request: ``ids`` (rows, layers, k) as an engine keeps them; -1 is not written yet."""

    name: str
    ids: np.ndarray
    tokens: np.ndarray
    num_prompt: int
    dtype: str = "int32"
    cached: int | None = None

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt].tolist()

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :].tolist()

    @property
    def narrow(self) -> str:
        """What engines store that look for the smallest dtype."""
        return "uint8" if self.dtype == "int32" else self.dtype


@dataclass(frozen=True)
class Truth:
    """What the model did on three texts: ``ids`` of every token, and what an engine keeps of it."""

    ids: list[np.ndarray]
    tokens: list[np.ndarray]

    @property
    def routed(self) -> np.ndarray:
        return np.concatenate([ids[:-1] for ids in self.ids])

    @property
    def written(self) -> list[Written]:
        kept = []
        for number, (ids, tokens) in enumerate(zip(self.ids, self.tokens, strict=True)):
            rows = np.zeros((len(ids) - 1, NUM_LAYERS, ids.shape[2]), np.int64)
            rows[:, FIRST:] = ids[:-1]
            kept.append(Written(f"req-{number}", rows, tokens, num_prompt=6))
        return kept

    @property
    def reference(self) -> Reference:
        lengths = [len(tokens) for tokens in self.tokens]
        document = np.repeat(np.arange(len(lengths)), lengths)
        columns = columns_of(document, np.concatenate(self.tokens))
        return Reference("rec", columns, np.concatenate(self.ids))


def truth(seed: int = 0, num_experts: int = EXPERTS, top_k: int = TOP_K) -> Truth:
    random = np.random.default_rng(seed)
    ids, tokens = [], []
    for length in LENGTHS:
        order = np.argsort(random.random((length, NUM_LAYERS - FIRST, num_experts)), axis=2)
        ids.append(order[:, :, :top_k])
        tokens.append(random.integers(5, 30_000, length))
    return Truth(ids, tokens)


def narrowed(request: Written, dtype: str) -> np.ndarray:
    """The ids as an engine stores them; what does not fit wraps, as in a cast of NumPy."""
    return request.ids.astype(dtype)


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode()


def packed(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def usage(request: Written) -> dict:
    details = None if request.cached is None else {"cached_tokens": request.cached}
    return {
        "prompt_tokens": request.num_prompt,
        "completion_tokens": len(request.answer),
        "prompt_tokens_details": details,
    }


def write_vllm(path: Path, requests: list[Written]) -> None:
    """/v1/completions of vLLM 0.22 to 0.33 with return_token_ids, one reply to a line."""
    records = []
    for request in requests:
        choice = {
            "index": 0,
            "text": "...",
            "prompt_token_ids": request.prompt,
            "token_ids": request.answer,
            "routed_experts": npy(narrowed(request, request.narrow)),
        }
        record = {"id": request.name, "object": "text_completion", "choices": [choice]}
        records.append(record | {"usage": usage(request)})
    lines(path, records)


def write_vllm_lists(path: Path, requests: list[Written]) -> None:
    """/v1/chat/completions of vLLM 0.21: nested lists, prompt and generation apart; a JSON list."""
    records = []
    for request in requests:
        of_prompt, of_answer = np.split(request.ids, [request.num_prompt])
        choice = {"index": 0, "token_ids": request.answer, "routed_experts": of_answer.tolist()}
        record = {
            "id": request.name,
            "prompt_routed_experts": of_prompt.tolist(),
            "prompt_token_ids": request.prompt,
            "choices": [choice],
            "usage": usage(request),
        }
        records.append(record)
    path.write_text(json.dumps(records))


def write_vllm_arrays(path: Path, requests: list[Written]) -> None:
    """CompletionOutput.routed_experts of vLLM 0.14 to 0.33, saved by users with np.savez."""
    np.savez(path, **{r.name: narrowed(r, r.dtype) for r in requests})


def write_sglang(path: Path, requests: list[Written]) -> None:
    """/generate of SGLang 0.5.7 to 0.5.23: raw int32; users keep the ids of the prompt beside."""
    records = []
    for request in requests:
        facts = {
            "id": request.name,
            "prompt_tokens": request.num_prompt,
            "completion_tokens": len(request.answer),
            "routed_experts": packed(narrowed(request, request.dtype).astype("<i4")),
        }
        if request.cached:
            facts["routed_experts_start_len"] = request.cached
        record = {"text": "...", "input_ids": request.prompt, "output_ids": request.answer}
        records.append(record | {"meta_info": facts})
    lines(path, records)


def write_prime_rl(path: Path, requests: list[Written]) -> None:
    """/inference/v1/generate behind prime-rl 559b44772e: base64, shape, start, dtype by value."""
    records = []
    for request in requests:
        ids = narrowed(request, request.narrow)
        experts = {
            "data": packed(ids),
            "shape": list(ids.shape),
            "start": request.cached or 0,
            "dtype": str(ids.dtype),
        }
        choice = {"index": 0, "routed_experts": experts, "token_ids": request.answer}
        prompt = {"request_id": request.name, "prompt_token_ids": request.prompt}
        records.append(prompt | {"choices": [choice]})
    lines(path, records)


def write_slime(
    path: Path, requests: list[Written], ids_of: Callable[[np.ndarray], Any] = torch.from_numpy
) -> None:
    """--save-debug-rollout-data of slime 624b824a89; of miles 31f1ca961a, where ids are of NumPy."""
    samples = [
        {
            "index": number,
            "tokens": request.tokens.tolist(),
            "response_length": len(request.answer),
            "status": "completed",
            "rollout_routed_experts": ids_of(narrowed(request, request.dtype)),
        }
        for number, request in enumerate(requests)
    ]
    torch.save({"rollout_id": 3, "samples": samples, "metadata": {}}, path)


def verl_arrays(requests: list[Written]) -> dict[str, np.ndarray]:
    """The batch of verl 0.9.1: prompts padded on the left, zeros where nothing was recorded."""
    widest = max(len(r.tokens) for r in requests) + 6
    arrays = {
        "attention_mask": np.zeros((len(requests), widest), np.int64),
        "input_ids": np.zeros((len(requests), widest), np.int64),
        "routed_experts": np.zeros(
            (len(requests), widest, *requests[0].ids.shape[1:]),
            "int16" if requests[0].dtype == "int32" else requests[0].dtype,
        ),
    }
    for number, request in enumerate(requests):
        start = 9 - request.num_prompt
        stop = start + len(request.tokens)
        arrays["attention_mask"][number, start:stop] = 1
        arrays["input_ids"][number, start:stop] = request.tokens
        rows = arrays["routed_experts"][number, start : start + len(request.ids)]
        rows[...] = narrowed(request, str(rows.dtype))[: len(rows)]
    return arrays


def batch_of(arrays_of: Callable[[list[Written]], dict[str, np.ndarray]]) -> Callable:
    """Writes a batch of arrays by the ending of its file."""

    def write(path: Path, requests: list[Written]) -> None:
        arrays = arrays_of(requests)
        if path.suffix == ".pt":
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
        elif path.suffix == ".safetensors":
            save_file(arrays, path)
        else:
            np.savez(path, **arrays)

    return write


def write_megatron(path: Path, requests: list[Written]) -> None:
    """router_trace_rank0.jsonl of Megatron-LM d98e8a64dd: one text to a step, layers from 1."""
    path.mkdir()
    lines(path / "router_trace_rank0.jsonl", megatron_lines(requests))


def megatron_lines(requests: list[Written], rank: int = 0) -> list[dict]:
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": rank,
            "num_tokens": len(request.ids),
            "topk": request.ids.shape[2],
            "top_indices": narrowed(request, request.dtype)[:, layer].tolist(),
        }
        for step, request in enumerate(requests)
        for layer in range(FIRST, request.ids.shape[1])
    ]


def write_llama(path: Path, requests: list[Written]) -> None:
    """llama-eval-callback, common/debug.cpp 27c299a6ec: generated tokens, one to a batch."""
    path.write_text("".join(llama_text(row[None]) for r in requests for row in r.ids))


def llama_text(ids: np.ndarray, last_only: bool = False, elided: bool = False) -> str:
    """One batch (tokens, layers, k): the selected experts of every layer, and a tensor between."""
    text = ["main: prompt is 5 tokens\n"]
    for layer in range(FIRST, ids.shape[1]):
        rows = ids[-1:, layer] if last_only and layer == ids.shape[1] - 1 else ids[:, layer]
        k, num = rows.shape[1], rows.shape[0]
        text.append(
            f"common_debug_cb_eval:       ffn_moe_topk-{layer} = (i32)       "
            f"VIEW(ffn_moe_argsort-{layer}{{64, {num}, 1, 1}}, }}) = {{{k}, {num}, 1, 1}}\n"
            "    [\n        [\n"
        )
        for number, row in enumerate(rows):
            if elided and number == 3:
                text.append("            ..., \n")
            if elided and 3 <= number < len(rows) - 3:
                continue
            shown = [f"{value:12.4f}" for value in row]
            if k > 6:
                shown = [*shown[:3], "   ...", *shown[-3:]]
            text.append(f"            [{', '.join(shown)} ],\n")
        text.append(f"        ],\n    ]\n    sum = {float(rows.sum()):f}\n")
        text.append(
            f"common_debug_cb_eval:    ffn_moe_weights-{layer} = (f32)   GET_ROWS("
            f"ffn_moe_probs-{layer}{{1, 64, {num}, 1}}, ffn_moe_topk-{layer}{{{k}, {num}, 1, 1}}}})"
            f" = {{1, {k}, {num}, 1}}\n    [\n        [\n            [      0.5000 ],\n"
            "        ],\n    ]\n    sum = 0.500000\n"
        )
    return "".join(text)


def write_nemo_rl(path: Path, requests: list[Written]) -> None:
    """Rollouts of NeMo Gym 07d6b0d070 with envelopes of NeMo RL 7ea279abfb, one turn each."""
    records = []
    for request in requests:
        record = {"_ng_task_index": int(request.name.removeprefix("req-")), "_ng_rollout_index": 0}
        output = [{"type": "reasoning"}, nemo_rl_item(request)]
        records.append(record | {"reward": 1.0, "response": {"output": output}})
    lines(path, records)


def nemo_rl_item(request: Written) -> dict:
    """Rows that are missing are -1, that of the last token counts up, further ones are cut."""
    num_tokens, top_k = len(request.tokens), request.ids.shape[2]
    ids = np.full((num_tokens, *request.ids.shape[1:]), -1, np.int16)
    ids[-1] = np.arange(top_k)
    num_rows = min(num_tokens - 1, len(request.ids))
    ids[:num_rows] = request.ids[:num_rows]
    shape = "x".join(map(str, ids.shape))
    return {
        "type": "message",
        "prompt_token_ids": request.prompt,
        "generation_token_ids": request.answer,
        "generation_log_probs": [-0.5] * (num_tokens - request.num_prompt),
        "routed_experts": f"nrlre1:int16:{shape}:{packed(ids)}",
    }


def areal_arrays(requests: list[Written]) -> dict[str, np.ndarray]:
    """A batch of AReaL PR 1496: layers with routers alone, a missing row repeats the one before."""
    widest = max(len(r.tokens) for r in requests) + 2
    layers, top_k = requests[0].ids.shape[1] - FIRST, requests[0].ids.shape[2]
    arrays = {
        "attention_mask": np.zeros((len(requests), widest), bool),
        "input_ids": np.zeros((len(requests), widest), np.int64),
        "routed_experts": np.zeros((len(requests), widest, layers, top_k), np.int32),
        "r3_routing_valid": np.ones(len(requests), bool),
    }
    for number, request in enumerate(requests):
        num_tokens = len(request.tokens)
        arrays["attention_mask"][number, :num_tokens] = True
        arrays["input_ids"][number, :num_tokens] = request.tokens
        rows = narrowed(request, "int32")[:num_tokens, FIRST:]
        rows = np.concatenate([rows, np.repeat(rows[-1:], num_tokens - len(rows), axis=0)])
        arrays["routed_experts"][number, :num_tokens] = rows
    return arrays


@dataclass(frozen=True)
class Writer:
    """How one dialect is written, and what its files say."""

    dialect: str
    file: str
    write: Callable[[Path, list[Written]], None]
    kinds: frozenset[str] = field(default_factory=frozenset)


def writer(dialect: str, file: str, write: Callable, *kinds: str) -> Writer:
    return Writer(dialect, file, write, frozenset(kinds))


#: ``tokens``: token ids are in the file; ``names layers``: layers are numbered; ``padded``: rows
#: that are missing are zeros; ``batches``: no requests; ``log``: all of them are one;
#: ``numbered``: requests have no names; ``aligned``: a row to a token, more are cut, missing ones
#: filled; ``routers``: layers without a router are left out; ``endless``: no end could be missing.
NUMBERED, NUMBERED_LOG = ("tokens", "numbered"), ("names layers", "batches", "log")
PADDED = (*NUMBERED, "padded")
WRITERS = {
    "vllm": writer("vllm", "replies.jsonl", write_vllm, "tokens"),
    "vllm 0.21": writer("vllm", "replies.json", write_vllm_lists, "tokens"),
    "vllm arrays": writer("vllm", "routes.npz", write_vllm_arrays),
    "sglang": writer("sglang", "replies.jsonl", write_sglang, "tokens"),
    "prime_rl": writer("prime_rl", "rollouts.jsonl", write_prime_rl, "tokens"),
    "slime": writer("slime", "rollout.pt", write_slime, *NUMBERED),
    "miles": writer("slime", "rollout.pt", partial(write_slime, ids_of=np.asarray), *NUMBERED),
    "verl": writer("verl", "batch.npz", batch_of(verl_arrays), *PADDED),
    "verl safetensors": writer("verl", "batch.safetensors", batch_of(verl_arrays), *PADDED),
    "verl torch": writer("verl", "batch.pt", batch_of(verl_arrays), *PADDED),
    "megatron": writer("megatron", "trace", write_megatron, "names layers", "batches"),
    "areal": writer("verl", "batch.pt", batch_of(areal_arrays), *PADDED, "routers"),
    "nemo_rl": writer("nemo_rl", "rollouts.jsonl", write_nemo_rl, "tokens", "aligned"),
    "llama_cpp": writer("llama_cpp", "eval.log", write_llama, *NUMBERED_LOG, "endless"),
}
