"""What a recipe is: an incident to be planted, the right answer to it, and the half it is in.

Recipes are scored, not asserted: `python -m tests.museum.score tuned|untouched`. Their incidents
are split by a thread, so that nobody chooses which of them moegeom is improved on. Who improves
it looks at the tuned half; the other tells whether what was learned there holds elsewhere.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Command = Literal["check", "explain", "signoff", "diff"]

#: What a command reads, in words.
Needs = Literal[
    "the weights",
    "the weights, and a baseline of before",
    "both checkpoints",
    "choices of both runs",
    "choices and routing weights of both runs",
    "choices and log-probabilities of both runs",
]

Half = Literal["tuned", "untouched"]

#: How an answer to damage is graded, the best first, and one to a twin.
Grade = Literal["named", "wrong cause", "only something is off", "missed"]
TwinGrade = Literal["right", "warned", "error"]


@dataclass(frozen=True)
class Said:
    """What moegeom answered.

    ``words`` are its verdicts: codes of a gate, the cause of a disagreement, states of the lines of
    a sign-off, words of a difference. ``text`` holds its sentences. ``open`` names no cause and
    claims no health; ``alarms`` where somebody would act on it, as on an error. ``release`` is the
    exit code under that profile, None where there is none.
    """

    words: tuple[str, ...]
    text: str
    claims: Literal["health", "open", "cause"]
    alarms: bool
    exit_code: int
    release: int | None = None


class Question(Protocol):
    """Files that were planted, and the command that is run on them."""

    def asked(self, folder: Path) -> Said: ...


@dataclass(frozen=True)
class Planted:
    """A size or a twin: a word of ``right`` must be said, if any, and the pattern ``told``."""

    text: str
    build: Callable[[], Question]
    right: tuple[str, ...]
    told: str = ""

    def is_answered(self, said: Said) -> bool:
        is_right = not self.right or bool(set(said.words) & set(self.right))
        return is_right and re.search(self.told, said.text, re.IGNORECASE) is not None

    def grade(self, said: Said) -> Grade:
        if self.is_answered(said):
            return "named"
        if set(said.words) & set(self.right):
            return "only something is off"
        return _GRADES[said.claims]

    def twin_grade(self, said: Said) -> TwinGrade:
        if self.is_answered(said):
            return "right"
        return "error" if said.alarms else "warned"


_GRADES: Mapping[str, Grade] = {
    "health": "missed",
    "open": "only something is off",
    "cause": "wrong cause",
}


@dataclass(frozen=True)
class Recipe:
    """An incident as data: what broke, how it is planted, and what should be said of it."""

    name: str
    threads: tuple[str, ...]
    story: str
    planting: str
    answer: str
    command: Command
    needs: Needs
    sizes: tuple[Planted, ...]
    twins: tuple[Planted, ...]

    @property
    def half(self) -> Half:
        return half_of(self.threads)


def half_of(threads: Sequence[str]) -> Half:
    """``tuned`` where the first byte of the SHA-256 of the first thread in text order is even."""
    first = min(threads)
    return "untouched" if hashlib.sha256(first.encode()).digest()[0] % 2 else "tuned"
