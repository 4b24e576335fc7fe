"""Every command that takes tokens counts the same tokens, and says on its screen which it left out.

The commands are those of the program, the options those that choose tokens.
"""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.engine.parameters import typed_parameters
from moegeom.engine.request import ComputeOptions, TokenTerms
from moegeom.engine.sample import drawn_tokens
from moegeom.geometry.selection import route
from moegeom.research.perturb import study as perturbed
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from moegeom.tokens.recording.writer import RecordingWriter
from moegeom_cli.command import built
from tests.by_day import by_day
from tests.columns import columns_of
from tests.e2e.test_every_way_in import COMMAND

SAMPLE = Path(__file__).resolve().parents[2] / "sample_ckpts/olmoe-balanced"

#: The router that each command looks at, and how many of its tokens are written: no more than any
#: command looks at, and so many that the numbers left out stand on a screen for nothing else.
ROUTER, NUM_TOKENS = "text/1", 483
EXPERTS, TOP_K, DOCUMENT_LENGTH = 16, 4, 37


@dataclass(frozen=True)
class State:
    """Tokens as people have them: which of them are no tokens, and what a command is told of that."""

    is_counted: Callable[[TokenColumns, np.ndarray], np.ndarray]
    options: tuple[str, ...] = ()
    documents: str = "several"
    num_tokens: int = NUM_TOKENS
    may_be_refused: str = ""


def finite(columns: TokenColumns, inputs: np.ndarray) -> np.ndarray:
    return np.isfinite(inputs).all(axis=1)


def everything(columns: TokenColumns, inputs: np.ndarray) -> np.ndarray:
    return np.ones(len(inputs), bool)


#: The third of the tokens of which the input is not finite.
LOST = np.arange(NUM_TOKENS) % 3 == 1

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
    loads = np.bincount(chosen[ROUTER][is_counted].ravel(), minlength=EXPERTS)
    if state.documents == "none":
        file = folder / "tokens.npz"
        np.savez(file, **{r.replace("/", "."): values for r, values in inputs.items()})
        return file, ["--stage", "router_input"], loads
    with RecordingWriter(
        folder / "tokens", "router_input", tuple(inputs), engine="test", domains=("text",)
    ) as writer:
        writer.append(columns, inputs, chosen)
    return folder / "tokens", [], loads


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
def test_the_same_tokens_count_everywhere_and_the_others_are_counted_on_the_screen(
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
    num_left_out = STATES[name].num_tokens - loads.sum() // TOP_K
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
