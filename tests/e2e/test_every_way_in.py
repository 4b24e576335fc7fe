"""Every command that takes tokens, on every kind of token file and stage, in every format;
whatever options choose tokens, it counts the same ones, and says on its screen which it left out.

The lists of commands, sources, stages, dialects and formats are those of the program, so that a new
one is tested without being named here, or fails because nobody says how to write such a file.
"""

import inspect
import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns, TopLogits
from moegeom.document.render import RENDERERS
from moegeom.engine.parameters import typed_parameters
from moegeom.engine.request import ComputeOptions, TokenTerms
from moegeom.engine.sample import drawn_tokens
from moegeom.geometry.selection import route
from moegeom.research.perturb import study as perturbed
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import SOURCES
from moegeom.tokens.stages import STAGE_TENSORS
from moegeom.tokens.traces.trace import DIALECTS
from moegeom_cli.command import COMMANDS, built, typed_words
from tests.by_day import by_day
from tests.columns import columns_of, recording_of
from tests.unit.tokens.dialects.test_counts import DIALECT as COUNT_DIALECT
from tests.unit.tokens.dialects.test_counts import WRITERS as COUNT_WRITERS
from tests.unit.tokens.dialects.written import EXPERTS, FIRST, NUM_LAYERS, TOP_K, Written
from tests.unit.tokens.dialects.written import WRITERS as TRACE_WRITERS

NUM_TOKENS, DOCUMENT = 120, 12

#: Stages whose files hold one array per router, which is what foreign files can hold.
PLAIN = tuple(stage for stage, tensors in STAGE_TENSORS.items() if len(tensors) == 1)


#: The shape that traces of the tests have: layer 0 is dense.
SHAPE = {"hidden": 32, "experts": EXPERTS, "top_k": TOP_K}


def write_model(path: Path) -> Path:
    """Routers in the layers that traces name, with random rows."""
    random = np.random.default_rng(1)
    tensors = {}
    for layer in range(FIRST, NUM_LAYERS):
        rows = random.standard_normal((EXPERTS, SHAPE["hidden"])) / 6
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = rows.astype(np.float32)
        gain = 1 + 0.1 * random.standard_normal(SHAPE["hidden"])
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = gain.astype(np.float32)
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": SHAPE["hidden"],
        "rms_norm_eps": 1e-6,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(FIRST)),
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclass(frozen=True)
class Tokens:
    """Tokens of the model at every stage, and what it chose."""

    columns: TokenColumns
    values: dict[str, dict[str, np.ndarray]]
    chosen: dict[str, np.ndarray]

    @property
    def document(self) -> np.ndarray:
        return self.columns.document.astype(np.int64)

    def arrays(self, stage: str, documents: bool) -> dict[str, np.ndarray]:
        held = {router.replace("/", "."): array for router, array in self.values[stage].items()}
        told = {"document": self.document, "token_id": self.columns.token_id}
        return held | (told if documents else {})

    def requests(self) -> list[Written]:
        """As engines keep them: a column for the dense layer, no row for the last token."""
        ids = np.stack([np.zeros_like(first := next(iter(self.chosen.values())))] * FIRST, axis=1)
        ids = np.concatenate([ids, np.stack(list(self.chosen.values()), axis=1)], axis=1)
        assert len(first) == NUM_TOKENS
        found = []
        for document in np.unique(self.document):
            rows = self.document == document
            texts = self.columns.token_id[rows].astype(np.int64)
            found.append(Written(f"req-{document}", ids[rows][:-1], texts, num_prompt=5))
        return found


def make_tokens(model: Path) -> Tokens:
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    random = np.random.default_rng(2)
    values = {stage: {} for stage in PLAIN}
    for router in load_routers(open_checkpoint(model)).routers:
        before = random.standard_normal((NUM_TOKENS, SHAPE["hidden"]))
        before *= np.exp(random.normal(size=(NUM_TOKENS, 1)))  # norm inputs differ in length
        rms = np.sqrt((before**2).mean(axis=1, keepdims=True) + 1e-6)
        values["pre_norm"][router.name] = before.astype(np.float32)
        inputs = (before / rms * router.gain).astype(np.float32)
        values["router_input"][router.name] = inputs
        logits = inputs @ router.weight.T.astype(np.float32)
        values["logits"][router.name] = logits
        values["ids"][router.name] = np.argsort(-logits, axis=1)[:, :TOP_K].astype(np.int32)
    document = np.arange(NUM_TOKENS) // DOCUMENT
    columns = columns_of(document, random.integers(5, 30_000, NUM_TOKENS), document % 2)
    return Tokens(columns, values, values["ids"])


def write_recording(path: Path, tokens: Tokens, stage: str, documents: bool) -> Path:
    top = {
        name: TopLogits(
            np.take_along_axis(found, np.argsort(-found)[:, :10], 1),
            np.argsort(-found)[:, :10].astype(np.int32),
        )
        for name, found in tokens.values["logits"].items()
    }
    values = top if stage == "top_logits" else None if stage == "ids" else tokens.values[stage]
    facts = {"engine": "test", "domains": ("code", "prose")}
    return recording_of(path, stage, tokens.columns, values, tokens.chosen, **facts)


def written_as(ending: str, save: Callable[[Path, dict[str, np.ndarray]], object]):
    """Writes the arrays of a stage as files of this kind hold them."""

    def write(path: Path, tokens: Tokens, stage: str, documents: bool) -> Path:
        file = path.with_suffix(ending)
        save(file, tokens.arrays(stage, documents))
        return file

    return write


def save_columns(path: Path, arrays: dict[str, np.ndarray]) -> None:
    columns = {key: pa.array(list(a)) if a.ndim == 2 else pa.array(a) for key, a in arrays.items()}
    pq.write_table(pa.table(columns), path)


def save_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    torch.save({key: torch.from_numpy(a.copy()) for key, a in arrays.items()}, path)


def write_trace(path: Path, tokens: Tokens, dialect: str, documents: bool) -> Path:
    if dialect in COUNTS:
        file, write, _ = COUNT_WRITERS[COUNTS[dialect]]
        counts = np.stack(
            [np.bincount(a.ravel(), minlength=EXPERTS) for a in tokens.chosen.values()]
        )
        path.mkdir()
        write(path / file, counts[None])
        return path / file
    one = next(one for one in TRACE_WRITERS.values() if one.dialect == dialect)
    path.mkdir()
    one.write(path / one.file, tokens.requests())
    return path / one.file


#: Dialects that hold counts, by name, and who writes them.
COUNTS = {dialect: name for name, dialect in COUNT_DIALECT.items()}

WRITE: dict[str, Callable[[Path, Tokens, str, bool], Path]] = {
    "recording": write_recording,
    "npy": written_as(".npy", lambda path, arrays: np.save(path, arrays["text.1"])),
    "npz": written_as(".npz", lambda path, arrays: np.savez(path, **arrays)),
    "safetensors": written_as(
        ".safetensors",
        lambda path, arrays: save_file(
            {k: np.ascontiguousarray(a) for k, a in arrays.items()}, path
        ),
    ),
    "parquet": written_as(".parquet", save_columns),
    "pt": written_as(".pt", save_tensors),
    "trace": write_trace,
}


@dataclass(frozen=True)
class Way:
    """One token file: its kind, its stage (of a trace, the dialect), whether it has documents."""

    kind: str
    stage: str
    documents: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.stage}{'' if self.documents else '-bare'}"

    @property
    def options(self) -> list[str]:
        told = [] if self.kind in ("recording", "trace") else ["--stage", self.stage]
        return [*told, "--layers", "1"] if self.kind == "npy" else told

    @property
    def is_counted(self) -> bool:
        return self.kind == "trace" and self.stage in COUNTS

    @property
    def has_choices(self) -> bool:
        return self.kind == "recording" or (self.holds("ids") and not self.is_counted)

    @property
    def has_documents(self) -> bool:
        return self.documents and self.stage not in WITHOUT_REQUESTS and not self.is_counted

    def holds(self, *stages: str) -> bool:
        return ("ids" if self.kind == "trace" else self.stage) in stages


#: Dialects of traces that do not say which rows are one text.
WITHOUT_REQUESTS = {one.dialect for one in TRACE_WRITERS.values() if "batches" in one.kinds}

WAYS = [
    *(Way("recording", stage) for stage in STAGE_TENSORS),
    *(Way("npy", stage, documents=False) for stage in PLAIN),
    *(Way("npz", stage, documents=False) for stage in PLAIN),
    *(Way(kind, "router_input", documents=False) for kind in ("safetensors", "parquet", "pt")),
    *(
        Way(kind, stage)
        for kind, stage in itertools.product(("npz", "safetensors", "parquet", "pt"), PLAIN)
    ),
    *(Way("trace", dialect) for dialect in DIALECTS.names()),
]


def one_side(command: str, *more: str) -> Callable[[Path, list[str]], list[str]]:
    words = typed_words(command.replace("-", "_")).split()
    return lambda file, told: [*words, "model", "--tokens", str(file), *told, *more]


def two_sides(command: str, *more: str) -> Callable[[Path, list[str]], list[str]]:
    def arguments(file: Path, told: list[str]) -> list[str]:
        again = file.parent / "again" / file.name  # some files are told by their names
        if not again.exists():
            again.parent.mkdir(exist_ok=True)
            (shutil.copytree if file.is_dir() else shutil.copy)(file, again)
        both = ["--tokens", str(file), "--tokens", str(again)]
        return [command, "model", "model", *both, *told, *more]

    return arguments


def always(way: Way) -> bool:
    return True


def never(way: Way) -> bool:
    return False


def of_inputs(way: Way) -> bool:
    return way.holds("router_input", "pre_norm")


def of_logits(way: Way) -> bool:
    return way.holds("router_input", "pre_norm", "logits")


LAYER = ("--layers", "1")

#: What each command is given, and the files that it must read; others it must refuse in words.
COMMAND: dict[str, tuple[Callable[[Path, list[str]], list[str]], Callable[[Way], bool]]] = {
    "scan": (one_side("scan"), always),
    "check": (one_side("check", *LAYER), always),
    "track": (one_side("track", *LAYER), always),
    "diff": (two_sides("diff", *LAYER), always),
    "boundary-report": (one_side("boundary-report", "--arith", "bf16", *LAYER), of_inputs),
    "cells": (one_side("cells", *LAYER, "--subspace", "pca:2"), of_inputs),
    "imbalance": (one_side("imbalance", *LAYER), of_logits),
    "perturb": (one_side("perturb", *LAYER, "--at", "3"), of_inputs),
    "capacity": (
        lambda file, told: (
            *("research", "capacity", "--from", "model", "--tokens", str(file), *told, *LAYER),
            *("--width", "64"),
        ),
        of_inputs,
    ),
    # the model is routers alone
    "regions": (one_side("regions", *LAYER), never),
    "outputs": (one_side("outputs", *LAYER), never),
    "continuity": (one_side("continuity", *LAYER), never),
    "whatif": (
        one_side("whatif", *LAYER, "--router", "topk:1", "--router", "capacity:1"),
        of_logits,
    ),
    "explain": (
        one_side("explain", "--run-b", "run_b", *LAYER),
        lambda way: way.has_documents and way.kind != "trace",
    ),
    "signoff": (two_sides("signoff"), lambda way: way.has_documents and way.has_choices),
}


#: Their --tokens is no file of tokens: a record of attention, and where tokens of parts are here.
OTHER_TOKENS = {"attention", "merge"}


def taking_tokens() -> set[str]:
    """Commands with an option --tokens that names files of tokens."""
    return {
        name.replace("_", "-")
        for name in COMMANDS.names()
        if "tokens" in inspect.signature(COMMANDS.run(name)).parameters
    }


def test_the_lists_of_this_file_leave_nothing_out():
    assert taking_tokens() - OTHER_TOKENS == set(COMMAND)
    assert taking_tokens() >= OTHER_TOKENS
    assert set(SOURCES.names()) == set(WRITE)
    written = {one.dialect for one in TRACE_WRITERS.values()} | set(COUNTS)
    assert set(DIALECTS.names()) == written


@dataclass(frozen=True)
class Files:
    """A model, the token file of each way, and a recording of another run; written once."""

    model: Path
    run_b: Path
    way: dict[Way, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("ways")
    model = write_model(folder / "model")
    tokens = make_tokens(model)
    last = list(tokens.chosen)[-1]
    other = tokens.chosen | {last: np.roll(tokens.chosen[last], 1, axis=0)}
    run_b = write_recording(
        folder / "run_b", Tokens(tokens.columns, tokens.values, other), "ids", True
    )
    return Files(
        model,
        run_b,
        {w: WRITE[w.kind](folder / w.name, tokens, w.stage, w.documents) for w in WAYS},
    )


def refuse_constant(name: str):
    raise AssertionError(f"{name} is no JSON")


def faults(shown: dict[str, dict[str, str]]) -> list[str]:
    """What no screen may show, whatever was measured."""
    found = []
    for form, by_width in shown.items():
        for columns, text in by_width.items():
            place = f"{form} at {columns}"
            if form == "json":
                json.loads(text, parse_constant=refuse_constant)
                continue
            found += [
                f"{place}: {line}"
                for line in text.splitlines()
                if WRONG.search(line)
                or (form == "table" and len(line) > int(columns) and not COPIED.match(line))
            ]
    return found


#: Words of Python, and control characters, on a screen.
WRONG = re.compile(r"\bNone\b|\bnan\b|NoneType|Traceback|<[a-z_.]+ object|[\x00-\x08\x0b-\x1f\x7f]")

#: What is shown of each; by day what people read and what programs do.
FORMS = by_day(RENDERERS.names(), ["table", "json"])

#: Lines that may be longer than the screen, since they are copied as they are.
COPIED = re.compile(r"\s*(next|fix|record|then)?:?\s*(moegeom |results  )|\S+$")


#: By day each file is read by one command, in turn, and each command reads one file that it must.
IN_TURN = [(command, way) for command, way in zip(itertools.cycle(COMMAND), WAYS, strict=False)]
READ = {command for command, way in IN_TURN if COMMAND[command][1](way)}
AS_IT_MUST = [
    (command, next(way for way in WAYS if reads(way)))
    for command, (_, reads) in COMMAND.items()
    if command not in READ and any(map(reads, WAYS))
]


@pytest.mark.parametrize(
    ("command", "way"),
    by_day(itertools.product(COMMAND, WAYS), {*IN_TURN, *AS_IT_MUST}),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_command_reads_this_file_or_says_why_not(moegeom, files, tmp_path, command, way):
    (tmp_path / "model").symlink_to(files.model)
    (tmp_path / "run_b").symlink_to(files.run_b)
    arguments, reads = COMMAND[command]
    ran = moegeom(tmp_path, *arguments(files.way[way], way.options), forms=FORMS)
    if ran.code in (2, 3):
        assert not reads(way), ran.err
        assert ran.err.startswith("error: ")
        assert not WRONG.search(ran.err.replace("\n", ""))
        assert not list(tmp_path.glob("runs/*")), "a refusal leaves nothing behind"
        return
    assert ran.code in (0, 1, 4), ran.err
    assert reads(way), "this worked although the list says that it cannot"
    assert faults(json.loads(ran.out)) == []


# ----------------------------------------------------------------------- options that choose tokens
SAMPLE = Path(__file__).resolve().parents[2] / "sample_ckpts/olmoe-balanced"

#: The router that each command looks at, and how many of its tokens are written: no more than any
#: command looks at, and so many that the numbers left out stand on a screen for nothing else.
ROUTER, SAMPLE_TOKENS = "text/1", 483
SAMPLE_EXPERTS, SAMPLE_TOP_K, DOCUMENT_LENGTH = 16, 4, 37


@dataclass(frozen=True)
class State:
    """Tokens as people have them: which of them are no tokens, and what a command is told of that."""

    is_counted: Callable[[TokenColumns, np.ndarray], np.ndarray]
    options: tuple[str, ...] = ()
    documents: str = "several"
    num_tokens: int = SAMPLE_TOKENS
    may_be_refused: str = ""


def finite(columns: TokenColumns, inputs: np.ndarray) -> np.ndarray:
    return np.isfinite(inputs).all(axis=1)


def everything(columns: TokenColumns, inputs: np.ndarray) -> np.ndarray:
    return np.ones(len(inputs), bool)


#: The third of the tokens of which the input is not finite.
LOST = np.arange(SAMPLE_TOKENS) % 3 == 1

STATES = {
    "a third is nan": State(finite, may_be_refused="--non-finite skip"),
    "a third is nan, skipped": State(finite, ("--non-finite", "skip")),
    "first tokens left out": State(
        lambda columns, inputs: columns.position >= 3, ("--exclude-first", "3")
    ),
    "no documents": State(everything, documents="none"),
    "one document": State(everything, documents="one"),
    "fewer than the sample": State(everything, num_tokens=113),
}

#: States in which every token counts: by day each command is given one of them, in turn.
ALL_COUNT = [name for name, state in STATES.items() if state.is_counted is everything]


def written(folder: Path, name: str) -> tuple[Path, list[str], np.ndarray]:
    """A file of tokens in this state, what must be typed to read it, the loads of what counts."""
    state = STATES[name]
    source = open_tokens(str(SAMPLE / "rec/step_1500"))
    count = state.num_tokens
    inputs = {r: source.read_values(r, 0, count).copy() for r in source.facts.routers}
    if state.is_counted is finite:
        for values in inputs.values():
            values[LOST] = np.nan
    length = {"several": DOCUMENT_LENGTH}.get(state.documents, count)
    token_id = source.read_columns(0, count).token_id
    columns = columns_of(np.arange(count) // length, token_id, domain=0)
    routers = load_routers(open_checkpoint(SAMPLE / "step_1500")).routers
    chosen = {
        r.name: route(np.nan_to_num(inputs[r.name]) @ r.weight.T, r.rule).chosen.astype(np.int32)
        for r in routers
    }
    is_counted = state.is_counted(columns, inputs[ROUTER])
    loads = np.bincount(chosen[ROUTER][is_counted].ravel(), minlength=SAMPLE_EXPERTS)
    if state.documents == "none":
        file = folder / "tokens.npz"
        np.savez(file, **{r.replace("/", "."): values for r, values in inputs.items()})
        return file, ["--stage", "router_input"], loads
    facts = {"engine": "test", "domains": ("text",)}
    path = recording_of(folder / "tokens", "router_input", columns, inputs, chosen, **facts)
    return path, [], loads


def values_of(document: Any, *keys: str) -> list[float]:
    """Numbers under one of these keys, wherever they stand."""
    if isinstance(document, list):
        return [value for inner in document for value in values_of(inner, *keys)]
    if not isinstance(document, dict):
        return []
    numbers = [v for k, v in document.items() if k in keys and isinstance(v, int | float)]
    return numbers + [v for inner in document.values() for v in values_of(inner, *keys)]


def max_vio(loads: np.ndarray) -> float:
    return loads.max() / loads.mean() - 1.0


def as_scanned(document: dict) -> float:
    """MaxVio of the router among the rows of a scan."""
    rows = document.get("layers") or document["routers"]
    (row,) = (
        row
        for row in rows
        if (row["router"], row["variant"], row["population"]) == (ROUTER, "as_stored", "all")
    )
    return row["max_vio_global"]


#: Where a command says how uneven loads are, as MaxVio or as tokens by expert; others do not.
LOADS: dict[str, Callable[[dict], float]] = {
    "scan": as_scanned,
    "boundary-report": as_scanned,
    "imbalance": lambda d: d["routers"][0]["laws"][-1]["figures"]["max_vio"],
    "outputs": lambda d: max_vio(np.array(values_of(d["routers"][0]["experts"], "num_tokens"))),
    "whatif": lambda d: d["stored"][ROUTER]["max_vio_global"],
}

#: Needs texts to compare runs by.
BY_DOCUMENTS = {"explain", "signoff"}


def cells() -> list:
    every = [*itertools.product(COMMAND, STATES)]
    in_turn = zip(COMMAND, itertools.cycle(ALL_COUNT))
    left_out = [cell for cell in every if cell[1] not in ALL_COUNT]
    chosen = by_day(every, [*in_turn, *left_out])
    return [pytest.param(*cell, id="-".join(cell)) for cell in chosen]


@pytest.fixture(scope="module", params=STATES)
def state(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return request.param, *written(folder, request.param)


@pytest.mark.parametrize(("command", "state"), cells(), indirect=["state"])
def test_the_same_tokens_count_everywhere_and_screens_count_the_others(
    moegeom, tmp_path, command, state
):
    name, file, options, loads = state
    (tmp_path / "model").symlink_to(SAMPLE / "step_1500")
    (tmp_path / "run_b").symlink_to(file)
    arguments = COMMAND[command][0](file, [*options, *STATES[name].options])
    if command == "capacity":  # this model says how wide its experts are
        arguments = arguments[: arguments.index("--width")]
    if command == "perturb":  # of the tokens that it draws itself
        arguments = arguments[: arguments.index("--at")]
    if command == "scan":
        arguments += ["--layers", "1"]
    ran = moegeom(tmp_path, *arguments, forms=["json", "table"])
    if ran.code in (2, 3) and (command in BY_DOCUMENTS and name == "no documents"):
        return
    if ran.code in (2, 3) and (words := STATES[name].may_be_refused):
        assert words in " ".join(ran.err.split())
        return
    assert ran.code in (0, 1, 4), ran.err
    forms = json.loads(ran.out)
    document = json.loads(forms["json"]["80"])
    if command in LOADS:
        assert LOADS[command](document) == pytest.approx(max_vio(loads), abs=1e-9)
    else:
        assert values_of(document, "max_vio_global", "max_vio") == []
    num_left_out = STATES[name].num_tokens - loads.sum() // SAMPLE_TOP_K
    if command == "perturb" and num_left_out and STATES[name].is_counted is finite:
        drawn = drawn_tokens(open_tokens(str(file)), ComputeOptions(), perturbed.SAMPLE)
        num_left_out = LOST[drawn].sum()
    if num_left_out:
        sentences = re.split(r"[.;] ", " ".join(forms["table"]["80"].split()))
        counting = [s for s in sentences if re.search(rf"\b{num_left_out}\b", s)]
        assert any(re.search(r"left out|not finite|[Ww]ithout", s) for s in counting), counting


def test_every_command_that_takes_tokens_has_every_option_of_tokens():
    options = {
        command: {param.name for param in built(command.replace("-", "_")).params}
        for command in COMMAND
    }
    for name in typed_parameters(TokenTerms):
        assert [command for command in COMMAND if name not in options[command]] == [], name


ON = ("--router-pattern", r"net\.(\d+)\.w", "--top-k", "2", "--score", "softmax")


@pytest.fixture
def place(tmp_path):
    drawn = np.random.default_rng(0)
    save_file({"net.0.w": drawn.standard_normal((8, 16), np.float32)}, tmp_path / "m.safetensors")
    tokens = drawn.standard_normal((200, 16), np.float32)
    tokens[3], tokens[7, 0] = np.nan, np.inf
    np.save(tmp_path / "some.npy", tokens)
    np.save(tmp_path / "none.npy", np.full_like(tokens, np.nan))
    return tmp_path


def typed(command: str, tokens: str) -> tuple[str, ...]:
    return (command, "m.safetensors", *ON, "--tokens", tokens, "--stage", "router_input")


def test_what_was_left_out_is_counted_on_screen_and_in_the_verdict_of_the_gate(moegeom, place):
    skip = ("--non-finite", "skip", "--out")
    screen = moegeom(place, *typed("scan", "some.npy"), *skip, "some", COLUMNS="120", code=0).words
    assert "Not finite, so left out: 2" in screen
    assert "Measured on these 198 tokens" in screen
    verdict = moegeom(place, "check", "some", COLUMNS="120").words
    assert "Not checked: 2 of 200 tokens (not finite)" in verdict
    screen = moegeom(place, *typed("scan", "none.npy"), *skip, "none", COLUMNS="120", code=0).words
    assert "Not one token is finite: nothing is known of load" in screen
    assert "holds for" not in screen
    assert "200 of 200 tokens (not finite)" in moegeom(place, "check", "none").words
