"""A family file of somebody's own: whatever it says, the answer is a family or a sentence."""

from __future__ import annotations

import random
import time
import tracemalloc
from importlib import resources
from pathlib import Path

import pytest

from moegeom.core.errors import UsageError
from moegeom.router.asked_family import read_family_file
from moegeom.router.family import Family
from tests.fuzz.mutations import rounds

_SECONDS = 2.0

_FILES = resources.files("moegeom.router.families")
_EXAMPLES = ("deepseek_v3", "ernie4_5_vl_moe", "inkling", "gguf_deepseek2")

_WORDS = [
    b"[[stacks]]", b"[stacks.norm]", b"= 3\n", b"= nan\n", b"= -inf\n", b"= [[[[[[]]]]]]\n", b"{", b"}",
    b'"', b"'''", b"\n", b"{layer}", b"{layer}.", b"{", b"\\", b"\xff", b"= 1979-05-27\n", b"true",
    b"9" * 5000, b"[" * 500, b"a.b.c.d = 1\n", b"\x00", b"{num_experts}", b"{0.__class__}",
]  # fmt: skip


def _mutate(raw: bytes, draw: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        span = draw.choice((0, 1, 2, 8, 40))
        data[at : at + span] = draw.choice(
            (
                bytes([draw.randrange(256)]),
                b"",
                bytes(data[at : at + span]) * 2,
                draw.choice(_WORDS),
            )
        )
    return bytes(data)


@pytest.mark.parametrize(("name", "count"), rounds(dict.fromkeys(_EXAMPLES, (150, 375))))
def test_mutated_files_end_in_a_family_or_a_sentence(name: str, count: int, tmp_path: Path) -> None:
    good = _FILES.joinpath(f"{name}.toml").read_bytes()
    draw = random.Random(f"moegeom {name}")
    path = tmp_path / "mine.toml"
    refused = 0
    for _ in range(count):
        path.write_bytes(_mutate(good, draw))
        started = time.process_time()
        try:
            assert isinstance(read_family_file(path), Family)
        except UsageError as error:
            assert error.message
            refused += 1
        assert time.process_time() - started < _SECONDS
    assert 0 < refused < count


def test_a_long_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="has more than 1048576 bytes"):
        read_family_file(path)


_STACK = """text = "x"
[[stacks]]
name = "s"
weight = [{names}]
top_k = {top_k}
score = "softmax"
[stacks.weights]
source = "scores"
renormalise = true
"""

#: Texts that ask for as much as they can; what the sentence about each begins with.
_GREEDY = {
    "dots of a key": ("a." * 32_000 + "b = 1", "mine.toml: line 1 has 32000 dots, more than 100."),
    "long keys": ("\n".join("a." * 99 + f"b{i}=1" for i in range(300)), "mine.toml: unknown key 'a'."),
    "tables": ("\n".join(f"[{i}{'.a' * 90}]" for i in range(300)), "mine.toml: unknown key '0'."),
    "brackets": ("a = " + "[" * 60_000, "mine.toml: is nested too deeply."),
    "digits": ("a = " + "1" * 60_000, "mine.toml: is not TOML (Exceeds the limit"),
    "names": (
        _STACK.format(names=",\n".join(f'"{{layer}}.{i}"' for i in range(3000)), top_k=2),
        "mine.toml: stacks[0]: weight has 3000 names, more than 100.",
    ),
    "a long value": ("text = [" + "1," * 30_000 + "]\nstacks = []", "mine.toml: text is [1, 1, 1,"),
    "a long pattern": (
        _STACK.format(names=f'"{"x" * 60_000}"', top_k=2), "mine.toml: pattern 'xxxxx",
    ),
    "an integer of no machine": (
        _STACK.format(names='"{layer}.x"', top_k=10**400), "mine.toml: stacks[0]: top_k is 1000",
    ),
    "characters": ("#" * 70_000, "mine.toml: has 70000 characters, more than 65536."),
}  # fmt: skip


@pytest.mark.parametrize("case", _GREEDY)
def test_a_greedy_family_file_is_refused_in_a_short_sentence(case: str, tmp_path: Path) -> None:
    text, sentence = _GREEDY[case]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(UsageError) as caught:
        read_family_file(path)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.message.startswith(sentence)
    assert len(str(caught.value)) < 500
    assert seconds < _SECONDS
    assert peak < 100_000_000
