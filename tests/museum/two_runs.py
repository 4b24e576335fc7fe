"""Two runs of one text: A as recorded, B by an engine of its own that may be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.router.load import load_routers
from moegeom.studies.explain.record import Explanation
from moegeom.studies.explain.study import ExplainRequest, explain
from moegeom.tokens.recording.writer import RecordingWriter
from tests.museum.checkpoint import Checkpoint, name_of

Array = np.ndarray
Step = Callable[[Array], Array]


def _as_is(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Engine:
    """The steps of a router as an engine takes them, written here once more and with torch.

    Each step may round what it is given, or replace it; ``ignores_groups`` and ``leaks_bias`` are
    faults that people have shipped.
    """

    weight: Step = _as_is
    inputs: Step = _as_is
    logits: Step = _as_is
    bias: Step = _as_is
    selection: Step = _as_is
    ignores_groups: bool = False
    leaks_bias: bool = False

    def route(self, model: Checkpoint, layer: int, inputs: Array) -> tuple[Array, Array]:
        """Experts, in descending order, and their routing weights."""
        config = model.config
        weight = model.tensors[name_of("weight", layer)].astype(np.float32)
        z = torch.nn.functional.linear(
            torch.from_numpy(self.inputs(inputs)), torch.from_numpy(self.weight(weight))
        )
        z = torch.from_numpy(self.logits(z.numpy()))
        if config["model_type"] == "qwen3_moe":
            scores = selection = torch.softmax(z, dim=-1)
            compared = z
        else:
            scores = torch.sigmoid(z)
            bias = self.bias(model.tensors[name_of("bias", layer)].astype(np.float32))
            selection = torch.from_numpy(self.selection((scores + torch.from_numpy(bias)).numpy()))
            compared = selection
            if not self.ignores_groups:
                compared = _of_best_groups(selection, config["n_group"], config["topk_group"])
        order = torch.sort(compared, dim=-1, descending=True, stable=True).indices
        chosen = order[:, : config["num_experts_per_tok"]]
        weights = (selection if self.leaks_bias else scores).gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * config.get("routed_scaling_factor", 1.0)
        return chosen.numpy().astype(np.int32), weights.numpy().astype(np.float32)


def _of_best_groups(selection: torch.Tensor, groups: int, kept: int) -> torch.Tensor:
    grouped = selection.view(len(selection), groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    mask = torch.zeros(len(selection), groups, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~mask[:, :, None], -torch.inf).view(selection.shape)


PLAIN = Engine()

#: What is done to the choices of B [layers, tokens, k] behind the router.
After = Callable[[Array, TokenColumns], Array]

#: Differences of log-probabilities, from random numbers and the number of tokens.
LogProbs = Callable[[np.random.Generator, int], Array]


@dataclass(frozen=True, eq=False)
class TwoRuns:
    """What each side ran; B is A where nothing else is said.

    ``noise`` is that of B's inputs over their rms, ``growth`` by how much it grows from layer to
    layer; B keeps ids, its routing weights, or its inputs. ``against`` is named to the command.
    With ``names_fingerprints`` B's recording says which checkpoint it is of.
    """

    a: Checkpoint
    b: Checkpoint | None = None
    engine: Engine = PLAIN
    noise: float = 0.0
    growth: float = 1.0
    after: After | None = None
    against: Checkpoint | None = None
    log_probs: LogProbs | None = None
    keeps: str = "ids"
    tokens: int = 2048
    seed: int = 0
    names_fingerprints: bool = False

    def explained(self, folder: Path) -> Explanation:
        """What the command says of them."""
        folder.mkdir(parents=True)
        a, b = self.a, self.b or self.a
        generator = np.random.default_rng([4243, self.seed])
        columns, names = _columns(self.tokens), [f"text/{layer}" for layer in a.layers]
        mine, inputs, ids, theirs, weights = {}, {}, [], {}, {}
        for number, layer in enumerate(a.layers):
            name = names[number]
            unit = _units(generator, self.tokens, int(a.config["hidden_size"]))
            inputs[name] = unit * _gain(a, layer)
            mine[name], _ = PLAIN.route(a, layer, inputs[name])
            scale = np.float32(self.noise * self.growth**number)
            moved = unit + scale * generator.standard_normal(unit.shape, dtype=np.float32)
            theirs[name] = moved * _gain(b, layer)
            chosen, weights[name] = self.engine.route(b, layer, theirs[name])
            ids.append(chosen)
        stacked = np.stack(ids)
        if self.after is not None:
            stacked = self.after(stacked, columns)
        other = dict(zip(names, stacked, strict=True))
        _record(folder / "a_rec", "router_input", names, columns, inputs, mine)
        of_b = ""
        if self.names_fingerprints:
            of_b = load_routers(open_checkpoint(b.write(folder / "b"))).fingerprint
        if self.keeps == "inputs":
            _record(folder / "b_rec", "router_input", names, columns, theirs, other)
        else:
            kept = {"routing_weights": weights} if self.keeps == "weights" else None
            _record(folder / "b_rec", "ids", names, columns, other, None, kept, of_b)
        log_probs = None
        if self.log_probs is not None:
            log_probs = folder / "log_probs.parquet"
            _write_log_probs(log_probs, columns, self.log_probs(generator, self.tokens))
        against = None
        if self.against is not None:
            against = str(self.against.write(folder / "c"))
        return explain(
            ExplainRequest(
                checkpoint=str(a.write(folder / "a")),
                tokens=str(folder / "a_rec"),
                run_b=str(folder / "b_rec"),
                checkpoint_b=against,
                log_probs=log_probs,
            )
        )


def _units(generator: np.random.Generator, tokens: int, hidden: int) -> Array:
    values = generator.standard_normal((tokens, hidden), dtype=np.float32)
    return values / np.sqrt((values**2).mean(axis=1, keepdims=True))


def _gain(model: Checkpoint, layer: int) -> Array:
    return model.tensors[name_of("gain", layer)].astype(np.float32)


def _columns(tokens: int, documents: int = 16) -> TokenColumns:
    position = np.arange(tokens) % (tokens // documents)
    return TokenColumns(
        document=np.arange(tokens) // (tokens // documents),
        position=position.astype(np.int32),
        token_id=np.random.default_rng(7).integers(0, 30_000, tokens).astype(np.int32),
        domain=np.zeros(tokens, np.int16),
    )


def _record(
    path: Path,
    stage: str,
    names: Sequence[str],
    columns: TokenColumns,
    values: Mapping[str, Array],
    chosen: Mapping[str, Array] | None,
    outputs: Mapping[str, Mapping[str, Array]] | None = None,
    fingerprint: str = "",
) -> None:
    with RecordingWriter(
        path, stage, tuple(names), dtype="float32", domains=("text",), fingerprint=fingerprint
    ) as writer:
        writer.append(columns, dict(values), chosen, outputs=outputs)


def _write_log_probs(path: Path, columns: TokenColumns, change: Array) -> None:
    known = columns.position > 0
    table = {
        "document": columns.document[known],
        "position": columns.position[known],
        "logprob": np.full(int(known.sum()), -1.5),
        "other_logprob": -1.5 + change[known],
    }
    pq.write_table(pa.table(table), path)
