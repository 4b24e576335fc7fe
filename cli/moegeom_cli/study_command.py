"""The command of a study: its arguments and options are the fields of its request."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from moegeom.studies.study import ResultsStudy, Study
from moegeom_cli.groups import PlotOptions, ScreenOptions, with_groups
from moegeom_cli.parts import show_part


def command_of(study: Study, **flags: Any) -> Callable[..., int]:
    """What the parser is given for a study; the exit code is that of the record, or 0.

    ``flags`` are options that are answered before there is a request, by their callbacks.
    """

    def run(
        request: Any, screen: ScreenOptions, plots: PlotOptions | None = None, **_: bool
    ) -> int:
        return _show(study, request, screen, plots)

    kinds: dict[str, type] = {"request": study.load("request"), "screen": ScreenOptions}
    if study.has_figures:
        kinds["plots"] = PlotOptions
    run.__doc__ = study.question + (
        "\n\nExit code 0 passed, 1 failed, 4 inconclusive." * study.is_gate
    )
    run.__annotations__ = kinds | flags
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword) for name in kinds]
    parameters += [inspect.Parameter(name, keyword, default=False) for name in flags]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return with_groups(run)


def _show(study: Study, request: Any, screen: ScreenOptions, plots: PlotOptions | None) -> int:
    """Runs a study and shows its page, or that of a part of its results; the exit code."""
    with screen.watching(study.unit) as watch:
        if isinstance(study, ResultsStudy):
            written = study.written(request, watch)
        else:
            answer = study.load("run")(request, watch)
    if isinstance(study, ResultsStudy):
        if request.part is not None:
            show_part(screen, written)
            return 0
        answer = study.record_at(written)
    screen.show(study.load("document"), answer, plots=plots)
    return getattr(answer, "exit_code", 0)
