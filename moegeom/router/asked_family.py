"""A family that somebody describes on the command line, in a file or by patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.router import MONOTONE_SCORES
from moegeom.router.family import Choice, Family, Setting, StackSpec, TensorName, WeightsSpec
from moegeom.router.family_file import family_of_text

#: A family file takes some kilobytes.
_MOST_BYTES = 1 << 20

#: Names that are longer come from a file that nobody vouches for: no pattern is tried on them.
_LONGEST_NAME = 200

#: Scores of rules without a number of experts to choose, and what they choose instead.
_NO_FIXED_NUMBER = {
    "relu": "a token takes every expert whose logit is positive, as many as there are",
}

_NUMBER = re.compile(r"(?<![^._])[0-9]{1,6}(?=\.)")


@dataclass(frozen=True)
class AskedFamily:
    """What somebody says about the routers of a checkpoint; nothing by default.

    ``file`` is a family file. ``pattern``, ``selection_bias`` and ``logit_bias`` are regular
    expressions for whole tensor names; a group in them is the layer number.
    """

    file: Path | None = None
    pattern: str | None = None
    top_k: int | None = None
    score: str | None = None
    renormalise: bool = False
    selection_bias: str | None = None
    logit_bias: str | None = None

    def family(self, names: Collection[str]) -> Family | None:
        """The family that is described, None for none.

        Raises
        ------
        UsageError
            If the description is not complete, or fits no tensor.
        """
        by_pattern = (self.pattern, self.top_k, self.score, self.selection_bias, self.logit_bias)
        if self.file is not None:
            if any(value is not None for value in by_pattern):
                raise UsageError("--family FILE says everything: leave out the other options.")
            return read_family_file(self.file)
        if all(value is None for value in by_pattern):
            return None
        return self._by_pattern(names)

    def _by_pattern(self, names: Collection[str]) -> Family:
        if self.pattern is None or self.top_k is None or self.score is None:
            given = {
                "--router-pattern": self.pattern,
                "--top-k": self.top_k,
                "--score": self.score,
            }
            missing = [option for option, value in given.items() if value is None]
            raise UsageError(
                f"{' and '.join(missing)} missing: which tensors are routers, how many experts "
                "are chosen and by which score is not guessed.",
                "--router-pattern REGEX --top-k K --score NAME",
            )
        if self.score in _NO_FIXED_NUMBER:
            raise UsageError(
                f"--score {self.score}: {_NO_FIXED_NUMBER[self.score]}; only rules that choose a "
                "fixed number of experts are measured.",
                "Record what the model chose and compare loads there.",
            )
        if self.score not in MONOTONE_SCORES:
            raise UsageError(
                f"--score {self.score}: expected one of {', '.join(sorted(MONOTONE_SCORES))}."
            )
        is_of_logits = self.score == "identity"
        stack = StackSpec(
            name="text",
            weight=_names(self.pattern, names, "--router-pattern"),
            top_k=Setting(value=self.top_k),
            score=Choice(self.score),
            weights=WeightsSpec(
                Choice("softmax_of_selected_logits" if is_of_logits else "scores"),
                Setting(value=self.renormalise),
            ),
            prefixes=("",),
            selection_bias=_names(self.selection_bias, names, "--selection-bias"),
            logit_bias=_names(self.logit_bias, names, "--logit-bias"),
            hidden_size=Setting(),
        )
        said = "logits" if is_of_logits else self.score.replace("_", "-")
        bias = " + selection bias" if self.selection_bias else ""
        text = f"{said}{bias}, choose {{top_k}} of {{num_experts}}, as described by options"
        return Family("described", "the command line", (), text, (stack,))


NOTHING_ASKED = AskedFamily()


def read_family_file(path: Path) -> Family:
    """The family that a TOML file of one's own describes.

    Raises
    ------
    UsageError
        If the file cannot be read or says something that is not understood.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path.name}: has more than {_MOST_BYTES} bytes.")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}).",
            "--family takes a TOML file; `moegeom families` lists the families that are known.",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name}: is not UTF-8 at byte {error.start}.") from None
    try:
        return family_of_text(path.stem, text)
    except InternalError as error:
        raise UsageError(
            error.message, error.hint or "See docs/families.md for the keys."
        ) from None


def _names(pattern: str | None, names: Collection[str], option: str) -> tuple[TensorName, ...]:
    """Name patterns of everything that a regular expression fits."""
    if pattern is None:
        return ()
    try:
        shape = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} '{pattern}': is no regular expression ({error}).") from None
    found = list(dict.fromkeys(_templates(shape, names, option)))
    if not found:
        raise UsageError(
            f"{option} '{pattern}': fits none of {len(names)} tensor names.",
            "It must fit the whole name, such as 'model.layers.([0-9]+).moe.router.weight'.",
        )
    return tuple(TensorName(name) for name in found)


def _templates(shape: re.Pattern[str], names: Collection[str], option: str) -> Iterator[str]:
    for name in names:
        hit = shape.fullmatch(name) if len(name) <= _LONGEST_NAME else None
        if hit is None:
            continue
        spans = [hit.span(1)] if shape.groups else [n.span() for n in _NUMBER.finditer(name)]
        if len(spans) != 1 or not name[slice(*spans[0])].isdecimal():
            raise UsageError(
                f"{option}: which number of '{name}' is the layer is not clear.",
                "Put a group around it: 'model.layers.([0-9]+).moe.router.weight'.",
            )
        begin, end = spans[0]
        yield f"{name[:begin]}{{layer}}{name[end:]}"
