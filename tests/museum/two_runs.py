"""Two runs of one text: A as recorded, B by an engine of its own that may be wrong.

With why they differ: a disagreement, its pairs, and the verdict that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import Stage, TokenColumns
from moegeom.router.load import load_routers
from moegeom.studies.explain.record import Cause, Explanation
from moegeom.studies.explain.study import ExplainRequest, explain
from tests.columns import columns_of, recording_of
from tests.generator.scoring import HEALTHY
from tests.museum.checkpoint import Checkpoint, name_of
from tests.museum.recipe import Needs

Array = np.ndarray
Step = Callable[[Array], Array]


def _as_is(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class Engine:
    """The steps of a router as an engine takes them, written here once more and with torch.

    Each step may round what it is given, or replace it; ``score`` replaces the sigmoid of families
    that have one, and a group is worth the sum of its ``group_best`` best experts. The others are
    faults that people have shipped.
    """

    weight: Step = _as_is
    inputs: Step = _as_is
    logits: Step = _as_is
    bias: Step = _as_is
    selection: Step = _as_is
    score: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid
    group_best: int = 2
    ignores_groups: bool = False
    leaks_bias: bool = False
    renormalises: bool = True
    scales: bool = True

    def route(self, model: Checkpoint, layer: int, inputs: Array) -> tuple[Array, Array]:
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
            scores = self.score(z)
            bias = self.bias(model.tensors[name_of("bias", layer)].astype(np.float32))
            selection = torch.from_numpy(self.selection((scores + torch.from_numpy(bias)).numpy()))
            compared = selection
            if not self.ignores_groups:
                compared = self._of_best_groups(selection, config["n_group"], config["topk_group"])
        order = torch.sort(compared, dim=-1, descending=True, stable=True).indices
        chosen = order[:, : config["num_experts_per_tok"]]
        weights = (selection if self.leaks_bias else scores).gather(1, chosen)
        if self.renormalises:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.scales:
            weights = weights * config.get("routed_scaling_factor", 1.0)
        return chosen.numpy().astype(np.int32), weights.numpy().astype(np.float32)

    def _of_best_groups(self, selection: torch.Tensor, groups: int, kept: int) -> torch.Tensor:
        grouped = selection.view(len(selection), groups, -1)
        worth = grouped.topk(self.group_best, dim=-1).values.sum(dim=-1)
        best = worth.topk(kept, dim=-1).indices
        mask = torch.zeros(len(selection), groups, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~mask[:, :, None], -torch.inf).view(selection.shape)


PLAIN = Engine()

#: What is done to the choices of B [layers, tokens, k] behind the router.
After = Callable[[Array, TokenColumns], Array]

#: What is done to the normed inputs of both sides [tokens, hidden] before a layer reads them.
Before = Callable[[Array, TokenColumns], Array]

#: Tokens that a fault reaches, one truth value for each.
Where = Callable[[TokenColumns], Array]

#: Differences of log-probabilities, from random numbers and the number of tokens.
LogProbs = Callable[[np.random.Generator, int], Array]


@dataclass(frozen=True, eq=False)
class Routed:
    """What each side read and chose, by router, and differences of log-probabilities in nats."""

    columns: TokenColumns
    a_inputs: Mapping[str, Array]
    a_chosen: Mapping[str, Array]
    b_inputs: Mapping[str, Array]
    b_chosen: Mapping[str, Array]
    b_weights: Mapping[str, Array]
    log_probs: Array | None

    def differs(self) -> Array:
        """True for each layer and token whose sets of experts are not equal."""
        pairs = [(self.a_chosen[name], self.b_chosen[name]) for name in self.a_chosen]
        return np.stack([(np.sort(a, 1) != np.sort(b, 1)).any(axis=1) for a, b in pairs])


@dataclass(frozen=True, eq=False)
class TwoRuns:
    """What each side ran; B is A where nothing else is said.

    ``noise`` is that of B's inputs over their rms, ``growth`` by how much it grows from layer to
    layer; B keeps ids, its routing weights, or its inputs. ``before`` changes what both read, and
    where ``where`` says no, B is a plain engine with A's checkpoint. ``against`` is named to the
    command. With ``names_fingerprints`` B's recording says which checkpoint it is of.
    """

    a: Checkpoint
    b: Checkpoint | None = None
    engine: Engine = PLAIN
    noise: float = 0.0
    growth: float = 1.0
    before: Before | None = None
    after: After | None = None
    where: Where | None = None
    against: Checkpoint | None = None
    log_probs: LogProbs | None = None
    keeps: str = "ids"
    tokens: int = 2048
    seed: int = 0
    names_fingerprints: bool = False

    def routed(self) -> Routed:
        a, b = self.a, self.b or self.a
        generator = np.random.default_rng([4243, self.seed])
        document = np.arange(self.tokens) // (self.tokens // 16)
        token_id = np.random.default_rng(7).integers(0, 30_000, self.tokens)
        columns = columns_of(document, token_id, domain=0)
        reached = np.ones(self.tokens, bool) if self.where is None else self.where(columns)
        mine, inputs, ids, theirs, weights = {}, {}, [], {}, {}
        for number, layer in enumerate(a.layers):
            name = f"text/{layer}"
            unit = _units(generator, self.tokens, int(a.config["hidden_size"]))
            if self.before is not None:
                unit = self.before(unit, columns)
            inputs[name] = unit * _gain(a, layer)
            mine[name], _ = PLAIN.route(a, layer, inputs[name])
            scale = np.float32(self.noise * self.growth**number)
            moved = unit + scale * generator.standard_normal(unit.shape, dtype=np.float32)
            theirs[name] = moved * _gain(b, layer)
            chosen, weights[name] = self.engine.route(b, layer, theirs[name])
            if not reached.all():
                kept = PLAIN.route(a, layer, moved * _gain(a, layer))
                chosen = np.where(reached[:, None], chosen, kept[0])
                weights[name] = np.where(reached[:, None], weights[name], kept[1])
            ids.append(chosen)
        stacked = np.stack(ids)
        if self.after is not None:
            stacked = self.after(stacked, columns)
        other = dict(zip(mine, stacked, strict=True))
        nats = self.log_probs and self.log_probs(generator, self.tokens)
        return Routed(columns, inputs, mine, theirs, other, weights, nats)

    def explained(self, folder: Path) -> Explanation:
        folder.mkdir(parents=True)
        b, routed = self.b or self.a, self.routed()
        _record(folder / "a_rec", routed, "router_input", routed.a_inputs, routed.a_chosen)
        of_b = ""
        if self.names_fingerprints:
            of_b = load_routers(open_checkpoint(b.write(folder / "b"))).fingerprint
        if self.keeps == "inputs":
            _record(folder / "b_rec", routed, "router_input", routed.b_inputs, routed.b_chosen)
        else:
            weights = {"routing_weights": routed.b_weights} if self.keeps == "weights" else None
            _record(folder / "b_rec", routed, "ids", routed.b_chosen, None, weights, of_b)
        log_probs = None
        if routed.log_probs is not None:
            log_probs = folder / "log_probs.parquet"
            _write_log_probs(log_probs, routed.columns, routed.log_probs)
        against = self.against
        request = ExplainRequest(
            checkpoint=str(self.a.write(folder / "a")),
            tokens=str(folder / "a_rec"),
            run_b=str(folder / "b_rec"),
            checkpoint_b=None if against is None else str(against.write(folder / "c")),
            log_probs=log_probs,
        )
        return explain(request)


Runs = Callable[[], TwoRuns]


@dataclass(frozen=True)
class Pair:
    """Two runs and the verdict on them; ``begins`` is the layer where it begins, where it says."""

    text: str
    build: Runs
    cause: Cause = "arithmetic noise only"
    begins: int | None = None


@dataclass(frozen=True)
class Disagreement:
    """Something that made two runs disagree in public, rebuilt, and twins that merely look alike."""

    name: str
    story: str
    built: tuple[Pair, ...]
    needs: Needs = "choices of both runs"
    threads: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.built if pair.cause not in HEALTHY)

    @property
    def twins(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.built if pair.cause in HEALTHY)


def all_pairs(disagreements: Sequence[Disagreement]) -> list[tuple[Disagreement, Pair]]:
    return [(d, pair) for d in disagreements for pair in d.built]


def _units(generator: np.random.Generator, tokens: int, hidden: int) -> Array:
    values = generator.standard_normal((tokens, hidden), dtype=np.float32)
    return values / np.sqrt((values**2).mean(axis=1, keepdims=True))


def _gain(model: Checkpoint, layer: int) -> Array:
    return model.tensors[name_of("gain", layer)].astype(np.float32)


def _record(
    path: Path,
    routed: Routed,
    stage: Stage,
    values: Mapping[str, Array],
    chosen: Mapping[str, Array] | None,
    outputs: Mapping[str, Mapping[str, Array]] | None = None,
    fingerprint: str = "",
) -> None:
    facts = {"dtype": "float32", "domains": ("text",), "fingerprint": fingerprint}
    recording_of(path, stage, routed.columns, dict(values), chosen, outputs, **facts)


def _write_log_probs(path: Path, columns: TokenColumns, change: Array) -> None:
    known = columns.position > 0
    table = {
        "document": columns.document[known],
        "position": columns.position[known],
        "logprob": np.full(int(known.sum()), -1.5),
        "other_logprob": -1.5 + change[known],
    }
    pq.write_table(pa.table(table), path)
