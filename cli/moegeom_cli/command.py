"""Descriptions of commands, and the help screens made from them."""

from __future__ import annotations

import importlib
import re
import textwrap
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
    """Headings of ``moegeom --help``, in their order, and what is typed behind a branch."""

    ship = "Ship it?"
    measure = "Measure"
    compare = "Compare"
    why = "Why, what if"
    more = "More"
    research = "research"
    list = "list"


#: Groups whose commands are typed behind a word of their own, and what they are.
BRANCHES = {
    Group.research: "Cells, capacity, drift, experts, attention.",
    Group.list: "Routers, families, metrics, checks, presets.",
}


@dataclass(frozen=True)
class Command:
    """Where a command stands in ``moegeom --help``, and a line to begin with: ``example``.

    ``place`` orders the commands of a group. The parser calls ``run``; None is what is made of a
    study when it is typed.
    """

    group: Group
    place: int
    example: str
    run: Callable[..., Any] | None = None

    @classmethod
    def of(cls, study: Study, run: Callable[..., Any] | None = None) -> Command:
        """That of a study."""
        return cls(Group[study.group], study.place, study.example, run)


#: Modules that hold the command of their name; ``list`` holds those of that branch.
_MODULES = set(modules_of("moegeom_cli.commands")) - {Group.list}


class _Commands:
    """The commands of the folder, each module imported by itself, and one for each study."""

    def names(self) -> list[str]:
        """Their names in Python, sorted."""
        return sorted({*_MODULES, *studies(), *self._listings()})

    def __contains__(self, name: str) -> bool:
        return name in _MODULES or name in studies() or name in self._listings()

    def __getitem__(self, name: str) -> Command:
        if name in _MODULES:
            return getattr(importlib.import_module(f"moegeom_cli.commands.{name}"), name)
        return Command.of(studies()[name]) if name in studies() else self._listings()[name]

    def all(self) -> list[Command]:
        """Every command, in the order of names."""
        return [self[name] for name in self.names()]

    def run(self, name: str) -> Callable[..., Any]:
        """What the parser calls."""
        from moegeom_cli.groups import command_of

        return self[name].run or command_of(studies()[name])

    def _listings(self) -> dict[str, Command]:
        module = vars(importlib.import_module(f"moegeom_cli.commands.{Group.list}"))
        return {name: one for name, one in module.items() if isinstance(one, Command)}


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
    """``boundary-report`` for ``boundary_report``: the last word of a command as it is typed."""
    return module.replace("_", "-")


def typed_words(module: str) -> str:
    """``research cells`` for ``cells``: a command as it is typed."""
    group = COMMANDS[module].group
    return " ".join([*([group.value] if group in BRANCHES else []), typed_name(module)])


def _in_order(*groups: Group) -> list[str]:
    """The modules of the commands of these groups, in the order of the help; imports them all."""
    table = {name: COMMANDS[name] for name in COMMANDS.names()}
    own = [name for name in table if table[name].group in groups]
    return sorted(own, key=lambda name: (groups.index(table[name].group), table[name].place))


def command_names() -> list[str]:
    """All commands as they are typed, in the order of the help."""
    return [typed_words(name) for name in _in_order(*Group)]


#: Names that commands had, and those that they have.
_RENAMED = {"space": "imbalance", "balance": "imbalance"}

#: How every command is told a default.
_DEFAULTS = "MOEGEOM_THREADS=4 stands for --threads 4, and so for each option."

#: Widths of the headings and of the names in ``moegeom --help``.
_HEADING, _NAME = 14, 17


class Interrupted(Exception):
    """Ctrl-C in a command; ``args`` are sentences on what is kept."""


class Commands(TyperGroup):
    """The commands of some groups; one that is typed is the only one that is imported."""

    groups: tuple[Group, ...] = tuple(group for group in Group if group not in BRANCHES)

    def invoke(self, ctx: Any) -> Any:
        """As the parser does, which would turn an interruption into a bare exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted(*getattr(interrupt, "__notes__", ())) from interrupt

    def branches(self) -> list[str]:
        """Groups that are commands here."""
        return [group.value for group in BRANCHES if Group.more in self.groups]

    def list_commands(self, ctx: Any) -> list[str]:
        return [*map(typed_name, _in_order(*self.groups)), *self.branches()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = cmd_name.replace("-", "_")
        if cmd_name not in self.commands:
            if cmd_name in self.branches():
                self.commands[cmd_name] = _branch(Group(cmd_name))
            elif cmd_name == typed_name(module) and self._has(module):
                self.commands[cmd_name] = built(module)
        return self.commands.get(cmd_name)

    def _has(self, module: str) -> bool:
        return module in COMMANDS and COMMANDS[module].group in self.groups

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the parser does, which suggests a spelling from those it has seen.

        Raises
        ------
        UsageError
            For the name of a command that is typed otherwise.
        """
        name = args[0] if args else ""
        if name and self.get_command(ctx, name) is None:
            module = _RENAMED.get(name, name.replace("-", "_"))
            if module in COMMANDS:
                typed = f"moegeom {typed_words(module)}"
                raise UsageError(f"{name}: no such command.", f"Did you mean {typed}?")
            for one in self.list_commands(ctx):
                self.get_command(ctx, one)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The commands first, then what may stand before them, in a line."""
        self.format_commands(ctx, formatter)
        typed = ", ".join(max(param.opts, key=len) for param in self.get_params(ctx))
        formatter.write_paragraph()
        more = f"{ctx.command_path} COMMAND -h says more. Options: {typed}."
        formatter.write_text(f"{more} {_DEFAULTS}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A line for each command beside the question that it answers."""
        headings = {branch: BRANCHES[Group(branch)] for branch in self.branches()}
        rows = [(COMMANDS[name].group.value, typed_name(name)) for name in _in_order(*self.groups)]
        place = next((i for i, row in enumerate(rows) if row[0] == Group.more.value), len(rows))
        rows[place:place] = [(Group.more.value, name) for name in headings]
        formatter.write_paragraph()
        before = ""
        for heading, name in rows:
            text = headings.get(name) or _summary(self.get_command(ctx, name))
            head = "" if heading == before or len(self.groups) == 1 else heading
            indent = f"{head:<{_HEADING if len(self.groups) > 1 else 2}}{name:<{_NAME}}"
            before = heading
            lines = textwrap.wrap(text, formatter.width - len(indent))
            formatter.write(f"{indent}{lines[0]}\n")
            for line in lines[1:]:
                formatter.write(f"{'':{len(indent)}}{line}\n")


def _branch(group: Group) -> Commands:
    branch = Commands(
        name=group.value, help=BRANCHES[group], no_args_is_help=True, rich_markup_mode=None
    )
    branch.groups = (group,)
    return branch


def _summary(command: Any) -> str:
    """The first paragraph of its help."""
    return " ".join(command.help.partition("\n\n")[0].split())


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


def variable_of(option: str) -> str:
    """``MOEGEOM_THREADS`` for ``--threads``: what sets an option in the environment."""
    return f"MOEGEOM_{option.lstrip('-').replace('-', '_').upper()}"


def option_of_variable(name: str) -> str:
    """``--threads`` for ``MOEGEOM_THREADS``."""
    return f"--{name.removeprefix('MOEGEOM_').lower().replace('_', '-')}"


def built(module: str) -> Any:
    """A command as the parser has it."""
    command = COMMANDS[module]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name=typed_name(module), cls=Helpful)(COMMANDS.run(module))
    parsed = typer.main.get_command(alone)
    assert isinstance(parsed, Helpful)
    parsed.example = command.example
    parsed.no_args_is_help = any(param.required for param in parsed.params)
    for param in parsed.params:
        if param.param_type_name == "option":
            param.envvar = variable_of(param.opts[0])
    return parsed


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
