"""What is typed: every command, with what a member has for each of its parameters.

The list grows with the command line: a command has a line as soon as each parameter that it cannot
do without is in ``VALUES``; else a row says which one is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moegeom_cli.command import COMMANDS, built, typed_words

#: What stands for a parameter by its name, each value behind the option's own word where it is one;
#: {model}, {rec} and so on are places. No value at all: the parameter is left out.
Values = Mapping[str, tuple[str, ...]]

VALUES: Values = {
    "checkpoint": ("{model}",),
    "target": ("{model}",),
    "a": ("{model}",),
    "b": ("{model_b}",),
    "patterns": ("{step_1}", "{step_2}"),
    "files": ("{trace}",),
    "results": ("{scan}",),
    "tokens": ("{rec}",),
    "layers": ("{layer}",),
}

#: What a command has in place of that, or beside it; a flag has an empty text.
TOLD: Mapping[str, Values] = {
    "scan": {"layers": (), "out": ("{scan}",)},
    "check": {"layers": ()},
    "boundary-report": {"arithmetics": ("bf16-logits",), "out": ("{out}",)},
    "explain": {"run_b": ("{rec_b}",)},
    "signoff": {"tokens": ("{rec_a}", "{rec_b}"), "layers": ()},
    "diff": {"tokens": (), "layers": ()},
    "track": {"tokens": (), "layers": (), "out": ("{out}",)},
    "whatif": {"what_ifs": ("smooth:extra=0.5",), "out": ("{out}",)},
    "list routers": {"layers": ()},
    "research attention": {"tokens": (), "layers": ("{four}",)},
    "research cells": {"subspace": ("pca:2",)},
    "research continuity": {"yes": ("",)},
    "research outputs": {"yes": ("",)},
    "research regions": {"yes": ("",)},
}

#: Further lines, by the words that name them: the command, and what they change.
MORE: Mapping[str, tuple[str, Values]] = {
    "check of weights": ("check", {"tokens": ()}),
    "check --experts": ("check", {"tokens": (), "experts": ("",)}),
    "scan of weights": ("scan", {"tokens": (), "out": ("{out}",)}),
    "diff on tokens": ("diff", {"tokens": ("{rec_a}", "{rec_b}")}),
}

#: Why a command has no line.
LEFT_OUT: Mapping[str, str] = {
    "capture": "runs the model, most of whose weights are holes",
    "merge": "adds up what several machines scanned: the same folds as one scan",
}


@dataclass(frozen=True)
class Line:
    """One line to type, by name, or the ``reason`` why there is none; places stand in braces."""

    name: str
    words: tuple[str, ...] = ()
    reason: str = ""

    def needs(self, place: str) -> bool:
        """Does a word name this place?"""
        return f"{{{place}}}" in self.words

    @property
    def has_member(self) -> bool:
        """Is it about a checkpoint or its tokens at all?"""
        return any("{" in word for word in self.words)


def lines() -> Iterator[Line]:
    """Those of every command, ``report`` behind the scan that it prints."""
    names = {typed_words(module): module for module in COMMANDS.names()}
    for name in sorted(names, key=lambda one: (one == "report", not one.startswith("scan"), one)):
        if name in LEFT_OUT:
            yield Line(name, reason=LEFT_OUT[name])
            continue
        yield _line(name, name, names[name], TOLD.get(name, {}))
        for more, (of, added) in MORE.items():
            if of == name:
                yield _line(more, name, names[name], {**TOLD.get(name, {}), **added})


def _line(name: str, typed: str, module: str, own: Values) -> Line:
    words: list[str] = typed.split()
    values = {**VALUES, **own}
    parameters = built(module).params
    if absent := own.keys() - {one.name for one in parameters}:
        raise LookupError(f"{typed} has no {', '.join(sorted(absent))}")
    missing = [one.name for one in parameters if one.required and not values.get(one.name or "")]
    if missing:
        return Line(name, reason=f"no value for {', '.join(map(str, missing))} in {__name__}")
    for parameter in parameters:
        flag = [parameter.opts[0]] if parameter.param_type_name == "option" else []
        for value in values.get(parameter.name or "", ()):
            words += [*flag, value] if value else flag
    return Line(name, tuple(words))
