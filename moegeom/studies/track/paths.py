"""Which checkpoints a series consists of, in natural order, and the recording of each."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moegeom.checkpoint.remote.url import scheme_of, shown
from moegeom.core.documents import parse_json
from moegeom.core.errors import UsageError
from moegeom.core.files import read_regular
from moegeom.core.limits import MOST_JSON
from moegeom.core.text import spelled
from moegeom.results.reader import is_results

#: Names that say "not finished yet".
_UNFINISHED = (".partial", ".tmp", ".temp", ".incomplete")

#: Ends of the names of weight files, those that are not read yet included: these are refused with
#: their own sentence, not passed over as unfinished.
_WEIGHTS = (
    ".safetensors .safetensors.index.json .gguf .bin .pt .pth .ckpt .distcp .npz .h5 .msgpack"
).split()

#: Names that are listed where none matches.
_MOST_BESIDE = 6

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Candidate:
    """A directory or file that matches, and what ``{step}`` stands for in the recording's path."""

    path: Path
    step_text: str

    @property
    def name(self) -> str:
        return spelled(self.path.name)

    @property
    def step(self) -> float:
        """The number in the step text, by which the series is ordered; 0 where there is none."""
        return float((_NUMBER.findall(self.step_text) or ["0"])[-1])

    @property
    def is_results(self) -> bool:
        """True for a results directory, which was measured before."""
        return is_results(self.path)


class LeftStep(NamedTuple):
    """A step that is not in the series, and why: somebody writes it, or it cannot be read."""

    name: str
    reason: str
    is_being_written: bool = False


def find_checkpoints(patterns: Sequence[str]) -> tuple[list[Candidate], list[LeftStep]]:
    """Candidates in natural order (step_2 before step_10), and those skipped with the reason.

    ``{step}`` is the text that the first ``*`` of the pattern matched; for a path without one, the
    last number of its name. A path without wildcards is taken as it is.

    Raises
    ------
    UsageError
        For a URL; when nothing matches, one of several names holds no number, or two have the same
        one.
    """
    matches: dict[Path, str] = {}
    for pattern in patterns:
        if scheme_of(pattern):
            raise UsageError(
                f"{shown(pattern)}: is a URL; a series is made of paths.",
                "Download the checkpoints, or compare two of them with `moegeom diff`.",
            )
        # Path.glob refuses absolute patterns
        paths = [pattern] if Path(pattern).exists() else glob.glob(pattern)  # noqa: PTH207
        for path in paths:
            matches.setdefault(Path(path), _matched(pattern, path))
    if not matches:
        raise UsageError(f"{' '.join(patterns)}: no checkpoint matches.", _beside(patterns[0]))
    candidates, skipped = [], []
    for path, text in matches.items():
        half = being_written(path)
        if reason := half or unreadable(path):
            skipped.append(LeftStep(path.name, reason, bool(half)))
            continue
        candidate = Candidate(path, text)
        if len(matches) > 1 and not _NUMBER.search(text):
            raise UsageError(
                f"{path}: there is no step number in '{text}'.",
                "A series is ordered by the number in each name, such as step_1000.",
            )
        candidates.append(candidate)
    candidates.sort(key=lambda candidate: (candidate.step, candidate.name))
    for one, other in itertools.pairwise(candidates):
        if one.step == other.step:
            raise UsageError(
                f"{one.path} and {other.path} have the same step, {one.step:g}.",
                "Narrow the pattern.",
            )
    return candidates, sorted(skipped)


def _beside(pattern: str) -> str:
    """A hint for a pattern without matches: the missing folder, or names that do not match."""
    whole = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parent.parts)
    folder = Path(*whole)
    if not folder.is_dir():
        return f"There is no folder {folder}."
    names = sorted(child.name for child in folder.iterdir() if not child.name.startswith("."))
    listed = f"{', '.join(names[:_MOST_BESIDE])}{' ...' if len(names) > _MOST_BESIDE else ''}"
    where = "The current folder" if folder == Path() else str(folder)
    return (
        f"{where} holds {listed or 'nothing'}. A pattern is relative to it: 'checkpoints/step_*'."
    )


def recording_path(template: str, candidate: Candidate) -> str:
    """The template with {step} and {name} filled in."""
    return template.replace("{step}", candidate.step_text).replace("{name}", candidate.name)


def being_written(path: Path) -> str:
    """The sign that the directory is being written; empty where there is none."""
    if path.name.endswith(_UNFINISHED):
        return "its name says that it is being written"
    names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
    half = next((name for name in names if name.endswith(_UNFINISHED)), None)
    return f"{half} is being written" if half and not is_results(path) else ""


def unreadable(path: Path) -> str:
    """Why a directory is no whole checkpoint; empty for one that may be."""
    if not path.is_dir() or is_results(path):
        return ""
    names = sorted(child.name for child in path.iterdir())
    if not names:
        return "it is empty"
    if not any(name.endswith(tuple(_WEIGHTS)) for name in names):
        return "it holds no weights"
    if "config.json" not in names:
        return "it holds no config.json"
    reasons = (_missing_files(path / n) for n in names if n.endswith(".safetensors.index.json"))
    return next((reason for reason in reasons if reason), "")


def _missing_files(index: Path) -> str:
    try:
        files = set(parse_json(read_regular(index, MOST_JSON, follows=True))["weight_map"].values())
        missing = sorted(name for name in files if not (index.parent / name).exists())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ""  # opening it says what is wrong with it
    if not missing:
        return ""
    return f"{index.name} names {missing[0]}, which is not there ({len(missing)} of {len(files)})"


def _matched(pattern: str, path: str) -> str:
    """What the first star of the pattern stands for; else the last number of the name."""
    expression = "".join(
        "(.*?)" if part == "*" else "." if part == "?" else re.escape(part)
        for part in re.split(r"([*?])", pattern)
    )
    match = re.fullmatch(expression, path)
    if match and match.groups():
        return match[1]
    numbers = _NUMBER.findall(Path(path).name)
    return numbers[-1] if numbers else Path(path).name
