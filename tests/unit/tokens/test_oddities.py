"""What a trace lacks, and ids that are no choices: each kind by its word, and no word of a twin."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moegeom as mg
from moegeom.core.errors import RecordingError
from moegeom.studies.routes.record import FileOfRoutes
from moegeom.tokens.open import open_tokens
from moegeom.tokens.source import KnownRouter
from moegeom.tokens.traces.oddities import gap_of, period_of
from tests.unit.tokens.dialects.written import Written, write_vllm

NUM_REQUESTS, LAYERS, EXPERTS, TOP_K = 12, 3, 32, 4

#: From number of the request, length of its prompt, and ids, the ids that are written; None: none.
Change = Callable[[int, int, np.ndarray], np.ndarray]


def same(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
    return ids


def requests(
    change: Change = same,
    layers: int = LAYERS,
    top_k: int = TOP_K,
    answers: tuple[int, int] = (20, 50),
    skew: float = 0.0,
    dtype: str = "int16",
) -> Iterator[Written]:
    """Choices of the first experts with probabilities that fall as a power of their number."""
    draw = np.random.default_rng(7)
    for number in range(NUM_REQUESTS):
        prompt, answer = int(draw.integers(12, 30)), int(draw.integers(*answers))
        shape = (prompt + answer - 1, layers, EXPERTS)
        scores = draw.gumbel(size=shape) - skew * np.log(np.arange(1, EXPERTS + 1))
        ids = np.argsort(-scores, axis=2)[:, :, :top_k].astype(dtype)
        tokens = draw.integers(512, size=prompt + answer)
        yield Written(f"r{number}", change(number, prompt, ids), tokens, prompt, dtype=dtype)


def routes(path: Path, change: Change = same, **shape: Any) -> FileOfRoutes:
    write_vllm(path / "r.jsonl", list(requests(change, **shape)))
    (found,) = mg.routes(path / "r.jsonl").value.files
    return found


def put(value: int | np.ndarray, *at: slice | int) -> Change:
    def change(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
        ids[at] = value
        return ids

    return change


def prompts(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
    ids[:prompt] = 0
    return ids


def every(step: int, change: Change) -> Change:
    return lambda number, prompt, ids: (same if number % step else change)(number, prompt, ids)


def copied(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
    ids[:prompt] = ids[prompt - 1]
    return ids


#: Change, what the word is, and a part of the sentence.
MISSING: dict[str, tuple[Change, str, str]] = {
    "prompts are zeros": (
        prompts,
        "rows of prompts are missing",
        "in 12 of 12 requests: exactly the prompts, filled with 0.",
    ),
    "prompts of every third request": (
        every(3, prompts),
        "rows of prompts are missing",
        "in 4 of 12 requests, 1 of every 3 (one of 3 ranks?)",
    ),
    "prompts are absent": (
        lambda number, prompt, ids: ids[prompt:],
        "rows of prompts are missing",
        "exactly the prompts.",
    ),
    "prompts but the token that generates": (
        lambda number, prompt, ids: ids[prompt - 1 :],
        "rows of prompts are missing",
        "in 12 of 12 requests: exactly the prompts.",
    ),
    "prompts repeat a row": (copied, "rows of prompts repeat one row", "12 of 12 requests"),
    "one block is cached": (put(0, slice(0, 8)), "first rows are missing", "96 of"),
    "the last rows are of NaN": (
        put(EXPERTS, slice(-2, None)),
        "last rows are missing",
        "filled with 32, as kernels write for rows of NaN.",
    ),
    "a run in the middle": (
        every(5, put(-1, slice(10, 17))),
        "rows between others are missing",
        "21 of",
    ),
    "every fourth row": (put(0, slice(1, None, 4)), "rows are missing in turn", "1 of every 4"),
    "three of four rows": (
        lambda number, prompt, ids: np.where((np.arange(len(ids)) % 4 != 2)[:, None, None], 0, ids),
        "rows are missing in turn",
        "3 of every 4",
    ),
    "two runs": (
        lambda n, prompt, ids: put(0, slice(3, 7))(n, prompt, put(0, slice(9, 16))(n, prompt, ids)),
        "rows here and there are missing",
        "132 of",
    ),
    "requests of zeros": (
        every(4, put(0)),
        "whole requests are missing",
        "in 3 of 12 requests, 1 of every 4",
    ),
    "a layer": (put(0, slice(None), 1), "layers lack choices", "of all tokens: 1."),
    "the first experts where all scores are equal": (
        put(np.arange(TOP_K), slice(3, None, 7), 1),
        "experts in the order of their numbers stand in place of choices",
        "[0, 1, 2, 3] in this order",
    ),
    "the experts of a group": (
        put(np.arange(19, 15, -1), slice(3, None, 7), slice(1, 3)),
        "experts in the order of their numbers stand in place of choices",
        "[19, 18, 17, 16] in this order",
    ),
    "generation that was not captured": (
        lambda number, prompt, ids: put(ids[prompt - 1], slice(prompt, None))(number, prompt, ids),
        "rows repeat the row before them",
        "12 of 12 requests",
    ),
}


@pytest.mark.parametrize("kind", MISSING)
def test_what_is_missing_has_its_word_its_share_and_something_to_do(kind, tmp_path):
    change, word, part = MISSING[kind]
    layers = 5 if kind == "a layer" else LAYERS
    found = routes(tmp_path, change, layers=layers)
    assert (found.state, found.defects) == ("incomplete", ())
    (oddity,) = found.oddities
    assert oddity.word == word
    assert part in oddity.text
    assert oddity.hint.endswith((".", "?"))


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize("answers", [(20, 50), (1, 2)])
def test_whole_traces_are_sound(top_k, layers, skew, answers, tmp_path):
    found = routes(tmp_path, top_k=top_k, layers=layers, skew=skew, answers=answers)
    assert (found.state, found.oddities) == ("sound", ())


@pytest.mark.parametrize("num_left_out", [0, 1])
@pytest.mark.parametrize("answers", [(20, 50), (1, 2)])
def test_prompts_that_the_file_says_are_left_out_are_none_that_is_missing(
    num_left_out, answers, tmp_path
):
    def generated(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
        return ids[prompt - num_left_out :]

    whole = [
        Written(r.name, r.ids, r.tokens, r.num_prompt, r.dtype, r.num_prompt - num_left_out)
        for r in requests(generated, answers=answers)
    ]
    write_vllm(tmp_path / "r.jsonl", whole)
    if num_left_out or answers[1] > 2:  # else no row is left
        (found,) = mg.routes(tmp_path / "r.jsonl").value.files
        assert (found.state, found.oddities) == ("sound", ())


def test_arrays_of_one_length_may_be_padded_and_others_lack_their_first_rows(tmp_path):
    for name, least in (("padded", 0), ("cut", 1)):
        (tmp_path / name).mkdir()
        for number, request in enumerate(requests()):
            ids = request.ids[:32].copy()
            ids[: number + least] = 0
            np.save(tmp_path / name / f"{number}.npy", ids)
        (found,) = mg.routes(tmp_path / name).value.files
        assert found.state == ("incomplete" if least else "sound")
    for number, request in enumerate(requests()):  # padding behind tokens says nothing of them
        ids = np.concatenate([request.ids, 0 * request.ids[: number + 1]])
        np.save(tmp_path / "padded" / f"{number}.npy", ids)
    (found,) = mg.routes(tmp_path / "padded").value.files
    assert found.state == "sound"


def test_layers_in_front_of_tokens_are_not_called_sound(tmp_path):
    ids = np.concatenate([request.ids for request in requests()])
    np.save(tmp_path / "r.npy", ids.swapaxes(0, 1))
    (found,) = mg.routes(tmp_path / "r.npy").value.files
    assert found.state == "not judged"
    assert any("np.swapaxes(ids, 0, 1)" in one for one in found.not_looked_at)


def dropped(share: float) -> Change:
    draw = np.random.default_rng(3)
    return lambda number, prompt, ids: np.where(draw.random(ids.shape) < share, -1, ids)


def expert_choice(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
    """Each expert takes five tokens: tokens have other numbers of experts, up to 16."""
    draw, (rows, layers, _) = np.random.default_rng(number), ids.shape
    order = np.argsort(draw.random((rows, layers, EXPERTS)), axis=0)
    experts = np.where(np.argsort(order, axis=0) < 5, np.arange(EXPERTS), EXPERTS)
    return np.where((first := np.sort(experts, axis=2)[:, :, :16]) == EXPERTS, -1, first)


STRANGE: dict[str, tuple[Change, str]] = {
    "a capacity dropped slots": (dropped(0.05), "slots are dropped by a capacity"),
    "expert 0 fills slots": (
        put(0, slice(5, None, 9), 1, slice(2, None)),
        "slots are filled with expert 0",
    ),
    "local ids beside their number": (
        lambda number, prompt, ids: np.where(ids < 8, ids, 8),
        "ids are those of one rank",
    ),
    "a layer lacks prompts": (
        lambda number, prompt, ids: put(0, slice(0, prompt), 1)(number, prompt, ids),
        "layers lack choices",
    ),
    "experts choose": (expert_choice, "experts choose their tokens"),
    "the last expert fills slots": (
        put(EXPERTS - 1, slice(5, None, 9), 1, slice(2, None)),
        "slots are filled with expert 31",
    ),
    "an integer wrapped": (put(-17, 4, 1, 0), "ids are negative"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_ids_that_are_no_choices_are_refused_by_their_kind_once_for_all_requests(kind, tmp_path):
    change, word = STRANGE[kind]
    found = routes(tmp_path, change)
    assert found.state == "defective"
    assert {defect.word for defect in found.defects} == {word}
    text = " ".join(mg.routes(tmp_path / "r.jsonl").text(200).split())
    assert text.count(f"{word} in [") == 1
    assert f"So it is in {len(found.defects) - 1} more requests." in text


def known(num_experts: int = EXPERTS, top_k: int = TOP_K) -> tuple[KnownRouter, ...]:
    return tuple(KnownRouter(f"text/{n}", "text", n, num_experts, top_k) for n in range(LAYERS))


def opened(path: Path, **router: int):
    routers = known(**router)
    names = tuple(one.name for one in routers)
    return open_tokens(path, routers=names, checkpoint_routers=routers)


def test_minus_one_in_eight_bits_is_a_capacity_where_there_are_fewer_experts(tmp_path):
    write_vllm(tmp_path / "r.jsonl", list(requests(dropped(0.02), dtype="uint8")))
    with pytest.raises(RecordingError, match="slots are dropped by a capacity"):
        opened(tmp_path / "r.jsonl")


def test_ids_that_count_from_one_are_told_beside_their_checkpoint(tmp_path):
    write_vllm(tmp_path / "r.jsonl", list(requests(lambda number, prompt, ids: ids + 1)))
    with pytest.raises(RecordingError, match="ids are counted from 1"):
        opened(tmp_path / "r.jsonl")


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("size", [16, EXPERTS])
def test_ids_of_one_part_of_the_experts_are_those_of_a_rank(first, size, tmp_path):
    draw = np.random.default_rng(1)
    part = np.tile(np.arange(size) + first * (size < EXPERTS), (80, LAYERS, 1))

    def of_part(number: int, prompt: int, ids: np.ndarray) -> np.ndarray:
        return draw.permuted(part[: len(ids)], axis=2)[:, :, :TOP_K].astype(ids.dtype)

    write_vllm(tmp_path / "r.jsonl", list(requests(of_part)))
    words = [one.word for one in opened(tmp_path / "r.jsonl").facts.oddities]
    assert words == ["ids are those of one rank"] * (size < EXPERTS)


def test_a_period_is_the_least_shift_that_leaves_all_flags():
    draw = np.random.default_rng(2)
    for _ in range(400):
        flags = np.tile(draw.random(int(draw.integers(1, 7))) < 0.5, 9)[: int(draw.integers(4, 30))]
        shifts = [p for p in range(2, len(flags) // 3 + 1) if (flags[p:] == flags[:-p]).all()]
        assert period_of(flags) == min(shifts, default=0)


def test_every_row_that_is_missing_is_counted_once_where_tokens_are_counted():
    draw = np.random.default_rng(4)
    for _ in range(400):
        flags = draw.random(int(draw.integers(1, 40))) < draw.choice([0.05, 0.5, 0.95])
        gap = gap_of(flags, int(draw.integers(1, 20)))
        assert (gap.num_missing, gap.length) == (flags.sum(), len(flags))
        assert bool(gap.pattern) == flags.any()
