"""A family that somebody describes on the command line, in a file or by patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.files import read_regular
from moegeom.core.limits import FAMILY_CHARACTERS, FAMILY_NAME_LENGTH
from moegeom.core.option import option
from moegeom.core.router import MONOTONE_SCORES
from moegeom.router.family import (
    DESCRIBED,
    RELU,
    Choice,
    ExpertsSpec,
    Family,
    Setting,
    StackSpec,
    TensorName,
    WeightsSpec,
    families,
    load_family,
    parse_family,
)

#: Heading of these options in the help.
_PANEL = "Unknown architectures"

_NUMBER = re.compile(r"(?<![^._])[0-9]{1,6}(?=\.)")

#: What stands for a number in a pattern, with its group or without.
_LAYER_NUMBER = re.compile(r"\(?(?:\[[0-9-]+\]|\\d|\.)[+*](?:\[0-9\]\*)?\)?")


@dataclass(frozen=True)
class RequestedFamily:
    """What somebody says about the routers of a checkpoint; nothing by default.

    ``file`` is a family file, or the name of a family that is known. ``pattern``,
    ``selection_bias`` and ``logit_bias`` are regular expressions for whole tensor names; a group
    in them is the layer number.
    """

    file: Path | None = option("TOML file, or name of a family.", panel=_PANEL)
    pattern: str | None = option(
        "Names of router weights; a group is the layer.", metavar="REGEX", panel=_PANEL
    )
    top_k: int | None = option("Experts chosen per token.", min=1, panel=_PANEL)
    score: str | None = option("identity, softmax, sigmoid or sqrt_softplus.", panel=_PANEL)
    renormalise: bool = option("Weights are divided by their sum.", False, panel=_PANEL)
    selection_bias: str | None = option(
        "Names of biases that only select.", metavar="REGEX", panel=_PANEL
    )
    logit_bias: str | None = option("Names of biases of logits.", metavar="REGEX", panel=_PANEL)

    def family(self, names: Collection[str]) -> Family | None:
        """The family that is described, None for none.

        Raises
        ------
        UsageError
            If the description is not complete, or fits no tensor.
        """
        by_pattern = (
            self.pattern,
            self.top_k,
            self.score,
            self.renormalise or None,
            self.selection_bias,
            self.logit_bias,
        )
        if self.file is not None:
            if any(value is not None for value in by_pattern):
                raise UsageError("--family FILE says everything: leave out the other options.")
            is_name = str(self.file) in families() and not self.file.exists()
            return load_family(str(self.file)) if is_name else read_family_file(self.file)
        if all(value is None for value in by_pattern):
            return None
        return self._by_pattern(names)

    def names(self, names: Collection[str]) -> Collection[str]:
        """The names without routers of layers that the pattern leaves out."""
        if self.pattern is None:
            return names
        hits = _hits(self.pattern, names, "--router-pattern")
        loaded = {(_module(hit.pattern), hit.layer) for hit in hits}
        modules = {module for module, _ in loaded}
        heads = {module.partition("{layer}")[0] for module in modules}
        return {
            name
            for name in names
            if loaded.issuperset(place for place in _places(name, heads) if place[0] in modules)
        }

    def _by_pattern(self, names: Collection[str]) -> Family:
        if self.pattern is None or self.top_k is None or self.score is None:
            options = {
                "--router-pattern": self.pattern,
                "--top-k": self.top_k,
                "--score": self.score,
            }
            missing = [option for option, value in options.items() if value is None]
            raise UsageError(
                f"{' and '.join(missing)} missing: which tensors are routers, how many experts "
                "are chosen and by which score is not guessed.",
                "--router-pattern REGEX --top-k K --score NAME",
            )
        if self.score not in (*MONOTONE_SCORES, RELU):
            scores = ", ".join(sorted((*MONOTONE_SCORES, RELU)))
            raise UsageError(f"--score {self.score}: expected one of {scores}.")
        weight = _hits(self.pattern, names, "--router-pattern")
        _check_one_each(weight)
        biases = {
            option: _bias_hits(pattern, names, option, weight)
            for option, pattern in (
                ("--selection-bias", self.selection_bias),
                ("--logit-bias", self.logit_bias),
            )
        }
        is_of_logits = self.score == "identity"
        stack = StackSpec(
            name="text",
            weight=_patterns(weight),
            top_k=Setting(value=self.top_k),
            score=Choice(self.score),
            weights=WeightsSpec(
                Choice("softmax_of_selected_logits" if is_of_logits else "scores"),
                Setting(value=self.renormalise),
            ),
            prefixes=("",),
            selection_bias=_patterns(biases["--selection-bias"]),
            logit_bias=_patterns(biases["--logit-bias"]),
            hidden_size=Setting(),
            experts=ExpertsSpec(may_lack_gate=True),
        )
        score_text = "logits" if is_of_logits else self.score.replace("_", "-")
        bias = " + selection bias" if self.selection_bias else ""
        number = "every one above 0" if self.score == RELU else "top {top_k}"
        text = f"{score_text}{bias}, {number} of {{num_experts}}, as described by options"
        return Family(DESCRIBED, "the command line", (), text, (stack,))


NOTHING_ASKED = RequestedFamily()


def read_family_file(path: Path) -> Family:
    """The family that a TOML file of one's own describes.

    Raises
    ------
    UsageError
        If the file cannot be read or says something that is not understood.
    """
    try:
        text = read_regular(path, 4 * FAMILY_CHARACTERS, follows=True).decode("utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}).",
            "--family takes a TOML file or the name of a family: moegeom list families.",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name}: is not UTF-8 at byte {error.start}.") from None
    try:
        return parse_family(path.stem, text, model_types=[path.stem], source="a file of one's own")
    except InternalError as error:
        # the reader of families knows them by name
        what = error.message.removeprefix(f"{path.stem}.toml")
        raise UsageError(
            path.name + what, error.hint or "See docs/families.md for the keys."
        ) from None


@dataclass(frozen=True)
class _Hit:
    """A name that a regular expression fits, its pattern with ``{layer}``, and the layer."""

    name: str
    pattern: str
    layer: int


def _hits(pattern: str | None, names: Collection[str], option: str) -> list[_Hit]:
    """Everything that a regular expression fits."""
    if pattern is None:
        return []
    try:
        shape = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} '{pattern}': is no regular expression ({error}).") from None
    hits = list(_matches(shape, names, option))
    if not hits:
        raise UsageError(
            f"{option} '{pattern}': fits none of {len(names)} tensor names.",
            f"It must fit the whole name{_nearest(pattern, names)}.",
        )
    return hits


#: Names that are compared with a pattern which fits none, numbers aside.
_COMPARED = 4096


def _nearest(pattern: str, names: Collection[str]) -> str:
    """The names that look most like a pattern."""
    plain = _LAYER_NUMBER.sub("{i}", pattern).replace("\\", "")
    short = (name for name in names if len(name) <= FAMILY_NAME_LENGTH)
    alike = dict.fromkeys(_NUMBER.sub("{i}", name) for name in islice(short, 100_000))
    near = get_close_matches(plain, list(islice(alike, _COMPARED)), n=2, cutoff=0.5)
    if not near:
        return ", such as 'model.layers.([0-9]+).moe.router.weight'"
    return f": the nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(repr, near))}"


def _matches(shape: re.Pattern[str], names: Collection[str], option: str) -> Iterator[_Hit]:
    for name in names:
        hit = shape.fullmatch(name) if len(name) <= FAMILY_NAME_LENGTH else None
        if hit is None:
            continue
        spans = [hit.span(1)] if shape.groups else [n.span() for n in _NUMBER.finditer(name)]
        if len(spans) != 1 or not name[slice(*spans[0])].isdecimal():
            raise UsageError(
                f"{option}: which number of '{name}' is the layer is not clear.",
                "Put a group around it: 'model.layers.([0-9]+).moe.router.weight'.",
            )
        begin, end = spans[0]
        yield _Hit(name, f"{name[:begin]}{{layer}}{name[end:]}", int(name[begin:end]))


def _module(pattern: str) -> str:
    """The path of a router with its dot; what stores a weight of another name is its own."""
    return pattern.removesuffix("weight") if pattern.endswith(".weight") else pattern


def _places(name: str, heads: Collection[str]) -> Iterator[tuple[str, int]]:
    """Modules that a tensor may be in, ``{layer}`` for a number behind a head, and the layer."""
    if len(name) > FAMILY_NAME_LENGTH:
        return
    for number in re.finditer(r"[0-9]{1,6}", name):
        if name[: number.start()] not in heads:
            continue
        pattern = f"{name[: number.start()]}{{layer}}{name[number.end() :]}"
        for end in (*(dot.end() for dot in re.finditer(r"\.", pattern)), len(pattern)):
            yield pattern[:end], int(number[0])


def _patterns(hits: Iterable[_Hit]) -> tuple[TensorName, ...]:
    return tuple(TensorName(pattern) for pattern in dict.fromkeys(hit.pattern for hit in hits))


def _check_one_each(hits: Iterable[_Hit]) -> None:
    """Raise where two routers would have one layer number."""
    seen: dict[int, str] = {}
    for hit in hits:
        other = seen.setdefault(hit.layer, hit.name)
        if other != hit.name:
            raise UsageError(
                f"--router-pattern: fits '{other}' and '{hit.name}', two routers of layer "
                f"{hit.layer}.",
                "Load one stack at a time, or describe both in a --family FILE.",
            )


def _bias_hits(
    pattern: str | None, names: Collection[str], option: str, routers: Sequence[_Hit]
) -> list[_Hit]:
    """What the pattern of a bias fits; it must fit the bias of every router, if there is one."""
    hits = _hits(pattern, names, option)
    fitted = {hit.name for hit in hits}
    for template in dict.fromkeys(hit.pattern for hit in hits):
        for router in routers:
            name = template.replace("{layer}", str(router.layer))
            if name in names and name not in fitted:
                raise UsageError(
                    f"{option} '{pattern}': does not fit '{name}', the bias of a router that is "
                    "loaded.",
                    "Let both patterns fit the same layers, or choose layers with --layers.",
                )
    return hits
