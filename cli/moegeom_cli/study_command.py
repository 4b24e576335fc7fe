"""The command of a study: its arguments and options are the fields of its request."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from moegeom.engine.parameters import option_of, request_of
from moegeom.studies.study import Study
from moegeom_cli.groups import ModelOptions, PlotOptions, ScreenOptions, TokenOptions, with_groups
from moegeom_cli.options import Checkpoint, Overwrite, Tokens
from moegeom_cli.streams import parse_numbers

#: What a value is typed as, by what its field may hold: the first of these.
_TYPED = (bool, int, float, Path, str)


def command_of(study: Study) -> Callable[..., None]:
    """What the parser is given for a study."""
    record = study.load("request")
    hints = get_type_hints(record)
    own = [field for field in dataclasses.fields(record) if "help" in field.metadata]
    numbers = [field.name for field in own if get_origin(hints[field.name]) is tuple]
    parameters: dict[str, tuple[Any, Any]] = {
        "checkpoint": (Checkpoint, inspect.Parameter.empty),
        "tokens": (Tokens, None),
        **{field.name: _option(field, hints[field.name]) for field in own},
        "overwrite": (Overwrite, False),
        "token_options": (TokenOptions, inspect.Parameter.empty),
        "model": (ModelOptions, inspect.Parameter.empty),
        "screen": (ScreenOptions, inspect.Parameter.empty),
    }
    if study.has_figures:
        parameters["plots"] = (PlotOptions, inspect.Parameter.empty)

    def run(
        token_options: TokenOptions,
        model: ModelOptions,
        screen: ScreenOptions,
        plots: PlotOptions | None = None,
        **given: Any,
    ) -> None:
        given |= {name: parse_numbers(option_of(name), given[name]) for name in numbers}
        request = request_of(record, **given, **token_options.terms, **model.terms)
        with screen.watching() as watch:
            answer = study.load("run")(request, watch)
        screen.show(study.load("document"), answer, plots=plots)

    run.__doc__ = study.question
    run.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    vars(run)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, (kind, default) in parameters.items()
        ]
    )
    return with_groups(run)


def _option(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    """Type and default of one option; numbers of a tuple are typed with commas between them."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if is_union else (hint,)
    default: Any = field.default
    if get_origin(hint) is tuple:
        kind, default = str, ",".join(map(str, default)) or None
    else:
        kind = next(one for one in _TYPED if one in kinds)
    if default is None:
        kind = kind | None
    text, least = field.metadata["help"], field.metadata.get("min")
    option = typer.Option(option_of(field.name), help=text, min=least)
    return Annotated[kind, option], default
