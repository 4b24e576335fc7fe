"""The ``moegeom`` command: how it begins and ends. Commands are the files of ``commands``."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from typing import Annotated

import typer

from moegeom.core.errors import MoeGeomError, OutputError, is_full
from moegeom_cli import EXIT_INTERRUPTED, is_interruption
from moegeom_cli.command import Commands, Interrupted, command_names, option_of_variable
from moegeom_cli.streams import error_line, error_width, open_closed_streams, put_out

#: BadParameter < UsageError < this: the base of all errors of the parser, which typer takes from
#: click or from a copy of its own, depending on its version.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # type: ignore[assignment]

EXIT_USAGE = 2
EXIT_INTERNAL = 5

#: Characters of a name that are printed.
MOST_SHOWN = 200

#: Columns that a help screen fills at most.
WIDEST = 120

app = typer.Typer(
    name="moegeom",
    cls=Commands,
    help="Routers of Mixture-of-Experts checkpoints: how they route, how near tokens are to other "
    "experts. CKPT is a checkpoint, REC a recording of tokens.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": WIDEST, "help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        from moegeom import __version__

        typer.echo(f"moegeom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options of every command, given before its name."""


def exit_code(arguments: list[str]) -> int:
    """Runs the command line and returns the exit code, after printing errors."""
    open_closed_streams()
    try:
        code = app(arguments, standalone_mode=False)
    except MoeGeomError as error:
        return _refused(error)
    except ModuleNotFoundError as error:
        from moegeom.core.extras import left_out

        refusal = left_out(error, _typed(arguments))
        return _internal(error) if refusal is None else _refused(refusal)
    except PARSER_ERROR as error:
        error.show()  # type: ignore[attr-defined] - every error of the parser can show itself
        return EXIT_USAGE
    except Interrupted as interrupt:
        _show("; ".join(["interrupted", *interrupt.args]) + ".")
        return EXIT_INTERRUPTED
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        # the reader of our output has left, as `| head` does: nothing more to say, nothing wrong
        sys.stderr.close()
        return 0
    except OSError as error:
        if is_full(error):
            return _refused(OutputError.of("standard output", error))  # files say it where they are
        if not isinstance(error.filename, str):
            return _internal(error)
        message = f"{error.filename[:MOST_SHOWN]}: cannot be used ({error.strerror})."
        return _refused(MoeGeomError(message, "Name another file, or look at its rights."))
    except SystemExit as ending:
        # the parser's own answer to a reader that has left
        return 0 if ending.code == 1 else EXIT_INTERNAL
    except Exception as error:  # noqa: BLE001 - the last line of defence names the error and exits 5
        if is_interruption(error):
            raise KeyboardInterrupt from None
        return _internal(error)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt  # the parser's own answer, without a word
    return code if isinstance(code, int) else 0


def _typed(arguments: list[str]) -> str:
    """The command of a line, without moegeom."""
    line = " ".join(itertools.dropwhile(lambda word: word.startswith("-"), arguments))
    return next((name for name in command_names() if f"{line} ".startswith(f"{name} ")), "moegeom")


def _refused(error: MoeGeomError) -> int:
    notes = [*getattr(error, "__notes__", ()), *_from_environment(error.message)]
    _show(error_line(error.message, error.hint, "\n".join(notes), error_width()))
    return error.exit_code


def _from_environment(message: str) -> list[str]:
    """Options in a message that the environment sets: nobody may have typed them."""
    names = [name for name in os.environ if name.startswith("MOEGEOM_")]
    typed = [name for name in names if option_of_variable(name) in message.split()]
    return [f"{name} is set in the environment." for name in typed]


def _internal(error: Exception) -> int:
    _show(f"internal error: {type(error).__name__}: {error}\n  hint: this is a bug; --debug.")
    return EXIT_INTERNAL


def _show(text: str) -> None:
    if "--debug" in sys.argv[1:]:
        traceback.print_exc()
    put_out(f"{text}\n", is_error=True)
