"""Descriptions of commands, and the help screens made from them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from moegeom.core.errors import UsageError
from moegeom.core.registry import modules_of
from moegeom.studies.study import Study, studies


class Group(StrEnum):
    """Headings of ``moegeom --help``, in their order."""

    judge = "Judge a checkpoint"
    measure = "Measure routing"
    compare = "Compare"
    explore = "Look closer"
    reference = "Reference"


@dataclass(frozen=True)
class Command:
    """Where a command stands in ``moegeom --help``, and a line to begin with.

    ``place`` orders the commands of a group. Without arguments a command that needs some shows
    its help.
    """

    group: Group
    place: int
    example: str
    needs_arguments: bool = True

    @classmethod
    def of(cls, study: Study) -> Command:
        """That of a study."""
        has_words = len(study.example.split()) > 2
        return cls(Group[study.group], study.place, study.example, needs_arguments=has_words)


#: Every module of the folder is a command: COMMAND says what it is, ``run`` is what it does.
_MODULES = modules_of("moegeom_cli.commands")


class _Commands:
    """The commands of the folder, each imported by itself, and one for each study."""

    def names(self) -> list[str]:
        """Their names in Python, sorted."""
        return sorted({*_MODULES, *studies()})

    def __getitem__(self, name: str) -> Command:
        if name in _MODULES:
            return importlib.import_module(f"moegeom_cli.commands.{name}").COMMAND
        return Command.of(studies()[name])

    def all(self) -> list[Command]:
        """Every command, in the order of names."""
        return [self[name] for name in self.names()]

    def run(self, name: str) -> Callable[..., Any]:
        """What the parser calls."""
        if name in _MODULES:
            return importlib.import_module(f"moegeom_cli.commands.{name}").run
        from moegeom_cli.study_command import command_of

        return command_of(studies()[name])


COMMANDS = _Commands()

#: What the parser calls a value, and what people call it.
_VALUES = {
    "<str>": "TEXT",
    "<path>": "PATH",
    "<file>": "PATH",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
    "<list[str]>": "TEXT",
    "<list[int]>": "N",
    "<list[path]>": "PATH",
    "<list[Path]>": "PATH",
}

#: Ranges as the parser prints them, and in words.
_RANGES = (
    (re.compile(r"(-?[\d.]+)<=x<=(-?[\d.]+)"), r"\1 to \2"),
    (re.compile(r"(-?[\d.]+)<x<(-?[\d.]+)"), r"between \1 and \2"),
    (re.compile(r"(-?[\d.]+)<x<=(-?[\d.]+)"), r"above \1, at most \2"),
    (re.compile(r"(-?[\d.]+)<=x<(-?[\d.]+)"), r"from \1, below \2"),
    (re.compile(r"x>=(-?[\d.]+)"), r"at least \1"),
    (re.compile(r"x<=(-?[\d.]+)"), r"at most \1"),
    (re.compile(r"x>(-?[\d.]+)"), r"above \1"),
    (re.compile(r"x<(-?[\d.]+)"), r"below \1"),
)


def typed_name(module: str) -> str:
    """``boundary-report`` for ``boundary_report``: a command as it is typed."""
    return module.replace("_", "-")


def command_names() -> list[str]:
    """All commands as they are typed, in the order of the help; imports their modules."""
    table = {name: COMMANDS[name] for name in COMMANDS.names()}
    groups = list(Group)
    ordered = sorted(table, key=lambda name: (groups.index(table[name].group), table[name].place))
    return [typed_name(name) for name in ordered]


#: Names that commands had, and those that they have.
_RENAMED = {"space": "imbalance", "balance": "imbalance"}


class Interrupted(Exception):
    """Ctrl-C in a command; ``args`` are sentences on what is kept."""


class Commands(TyperGroup):
    """The commands of the folder; one that is typed is the only one that is imported."""

    def invoke(self, ctx: Any) -> Any:
        """As the parser does, which would turn an interruption into a bare exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(*getattr(interrupt, "__notes__", ())) from interrupt

    def list_commands(self, ctx: Any) -> list[str]:
        return command_names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = cmd_name.replace("-", "_")
        if module not in COMMANDS.names() or cmd_name != typed_name(module):
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _built(module)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the parser does, which suggests a spelling from those it has seen.

        Raises
        ------
        UsageError
            For a name that a command had.
        """
        if args and args[0] in _RENAMED:
            raise UsageError(
                f"{args[0]}: no such command.", f"Did you mean moegeom {_RENAMED[args[0]]}?"
            )
        if args and self.get_command(ctx, args[0]) is None:
            for name in map(typed_name, COMMANDS.names()):
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Commands under the headings of their groups, each with its whole sentence."""
        names = command_names()
        widest = max(map(len, names))
        for group in Group:
            with formatter.section(group.value):
                for name in names:
                    command = COMMANDS[name.replace("-", "_")]
                    if command.group is group:
                        line = self.get_command(ctx, name).get_short_help_str(10**6)
                        formatter.write_dl([(name.ljust(widest), line)])
                        indent = formatter.current_indent + widest + 2
                        formatter.write(f"{'':{indent}}$ {command.example}\n")


class Helpful(TyperCommand):
    """A command whose help begins with an example, and speaks of CKPT and N, with its panels of
    options last.
    """

    example = ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"Example: {self.example}\n\n")
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_plain_name(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_heading(param), []).append(_in_words(param, record))
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def _built(module: str) -> Any:
    command = COMMANDS[module]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name=typed_name(module), cls=Helpful, no_args_is_help=command.needs_arguments)(
        COMMANDS.run(module)
    )
    built = typer.main.get_command(alone)
    assert isinstance(built, Helpful)
    built.example = command.example
    return built


def _heading(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"


def _plain_name(piece: str) -> str:
    """``CKPT`` for ``{checkpoint}``, ``[TARGET]`` for ``[target]``."""
    inner = piece.removeprefix("{").replace("}", "")
    return inner if inner == "[OPTIONS]" else inner.upper().replace("CHECKPOINT", "CKPT")


def _in_words(param: Any, record: tuple[str, str]) -> tuple[str, str]:
    """A line of the help without the types of Python."""
    name, text = record
    for typed, word in _VALUES.items():
        name = name.replace(typed, word)
    if param.param_type_name == "argument":
        name = _plain_name(name.split()[0])
    name = re.sub(r"<([\w|-]+)>", r"\1", name)
    for pattern, word in _RANGES:
        text = pattern.sub(word, text)
    return name, text.replace("  [required]", "").replace("; required]", "]")
