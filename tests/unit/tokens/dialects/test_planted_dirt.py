"""Every dialect meets the same dirt; each case is cleaned with a count or refused by name."""

import re
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.core.tokens import TokenSource
from moegeom.tokens.open import open_tokens
from moegeom.tokens.traces.alignment import align, rows_of
from moegeom.tokens.traces.trace import DIALECTS, find_dialect
from tests.by_day import by_day
from tests.unit.tokens.dialects.planted import OMITTED, PLANTED, Outcome, Planted
from tests.unit.tokens.dialects.written import WRITERS, Writer, known, truth

CASES = [(planted, name) for planted in PLANTED for name in WRITERS]
CASES += [(OMITTED, name) for name in ("vllm", "vllm 0.21", "sglang", "prime_rl")]


def outcome_for(planted: Planted, name: str, writer: Writer) -> Outcome:
    for key in (name, *sorted(writer.kinds)):
        if key in planted.exceptions:
            return planted.exceptions[key]
    return planted.outcome


def cleaned(path: Path, dialect: str, num_experts: int) -> TokenSource:
    files = DIALECTS[dialect].files
    one = path if files is None or not path.is_dir() else files(path)[0]
    routers = known(num_experts)
    names = tuple(router.name for router in routers)
    return open_tokens(one, routers=names, checkpoint_routers=routers, dialect=dialect)


def of_the_day() -> list[tuple[Planted, str]]:
    """By day each dirt comes to each of its ends, and each dialect cleans, refuses and misplaces."""
    chosen: dict[tuple, tuple[Planted, str]] = {}
    for planted, name in CASES:
        outcome = outcome_for(planted, name, WRITERS[name])
        for mechanism in ((planted.name, outcome), (name, outcome[0])):
            chosen.setdefault(mechanism, (planted, name))
    return [case for case in CASES if case in chosen.values()]


@pytest.mark.parametrize(
    ("planted", "name"),
    by_day(CASES, of_the_day()),
    ids=lambda value: getattr(value, "name", value),
)
def test_dirt_is_cleaned_with_a_count_or_refused_by_name(planted, name, tmp_path):
    writer = WRITERS[name]
    held = planted.truth()
    path = tmp_path / writer.file
    writer.write(path, planted.plant(held.written))
    verdict, words = outcome_for(planted, name, writer)
    if verdict == "refused":
        with pytest.raises(RecordingError, match=pattern(words)):
            cleaned(path, writer.dialect, planted.num_experts)
        return
    found = cleaned(path, writer.dialect, planted.num_experts)
    if verdict == "misplaced":
        # a log of batches tells no documents apart, and is refused for that
        with pytest.raises(RecordingError, match=pattern(f"{words}|where its documents begin")):
            align(held.reference, rows_of(found, known(planted.num_experts)))
        return
    assert words in "; ".join(found.facts.notes)
    if planted.num_tokens is not None:
        assert found.facts.num_tokens == planted.num_tokens
        assert is_part_of_truth(found, held)


def pattern(words: str) -> str:
    return "|".join(re.escape(part) for part in words.split("|"))


def is_part_of_truth(found: TokenSource, held) -> bool:
    """Whether every row stands in the truth, in its order."""
    expected = np.concatenate([ids[:-1] for ids in held.ids])
    rows = {row.tobytes(): number for number, row in enumerate(expected.astype(np.int32))}
    num_tokens = found.facts.num_tokens
    chosen = [found.read_chosen(name, 0, num_tokens) for name in found.facts.routers]
    numbers = [rows.get(row.tobytes(), -1) for row in np.stack(chosen, axis=1)]
    return -1 not in numbers and numbers == sorted(numbers)


# the texts of llama.cpp have no end that could be missing; a batch that breaks off is tested apart
@pytest.mark.parametrize("name", [n for n, w in WRITERS.items() if "endless" not in w.kinds])
def test_a_truncated_file_is_refused(name, tmp_path):
    writer = WRITERS[name]
    path = tmp_path / writer.file
    writer.write(path, truth().written)
    file = next(path.iterdir()) if path.is_dir() else path
    raw = file.read_bytes()
    for share in (0.2, 0.5, 0.9):
        file.write_bytes(raw[: int(share * len(raw))])
        with pytest.raises(RecordingError, match=r"\S"):
            open_tokens(
                path, checkpoint_routers=known(), routers=("text/1",), dialect=writer.dialect
            )


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_is_what_is_read(name, tmp_path):
    writer, held = WRITERS[name], truth()
    writer.write(tmp_path / writer.file, held.written)
    dialect = find_dialect(tmp_path / writer.file, None)
    assert dialect is not None
    assert dialect.name == writer.dialect
    routers = ("text/1", "text/3")
    source = open_tokens(tmp_path / writer.file, checkpoint_routers=known(), routers=routers)
    assert source.facts.routers == routers
    assert source.facts.stage == "ids"
    for router, index in zip(routers, (0, 2), strict=True):
        expected = np.concatenate([ids[:-1, index] for ids in held.ids])
        np.testing.assert_array_equal(source.read_chosen(router, 0, 65), expected)
    columns = source.read_columns(0, 65)
    if "batches" not in writer.kinds:
        np.testing.assert_array_equal(columns.document, np.repeat([0, 1, 2], [19, 30, 16]))
    if "tokens" in writer.kinds:
        np.testing.assert_array_equal(
            columns.token_id, np.concatenate([tokens[:-1] for tokens in held.tokens])
        )
        np.testing.assert_array_equal(
            columns.position, np.concatenate([np.arange(n) for n in (19, 30, 16)])
        )
    else:
        np.testing.assert_array_equal(columns.position, -1)
