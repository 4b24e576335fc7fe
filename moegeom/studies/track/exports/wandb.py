"""A run of Weights & Biases: of each figure the median over routers and the worst of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moegeom.core.series import SERIES_COLUMNS, Curve, Series, SeriesColumn
from moegeom.studies.track.export import SeriesExport

#: Routers with a curve of their own, of each figure that has a bad direction.
NUM_WORST = 3


def write(series: Series, project: str) -> None:
    """A run in ``project`` (or ``entity/project``), as wandb itself is set up.

    Each step has ``<figure>/median`` over the routers, ``<figure>/worst``, and for the routers that
    are worst at the last step ``<figure>/<router>``. The summary names the worst router of each
    figure, the steps and the verdict. Rows by expert stay in the results.

    Raises
    ------
    UsageError
        When wandb is not installed.
    """
    EXPORT.refuse_absent()
    import wandb

    entity, _, name = project.rpartition("/")
    # no code is sent, and no git run, which obeys what lies in the working directory
    settings = wandb.Settings(disable_git=True, save_code=False)
    with wandb.init(
        project=name,
        entity=entity or None,
        name=series.name,
        job_type="moegeom track",
        settings=settings,
    ) as run:
        run.define_metric("*", step_metric="step")
        for step, logged in zip(series.steps, _by_step(series), strict=True):
            run.log({"step": step.step, **logged})
        run.summary.update(_summary(series))


def _by_step(series: Series) -> Sequence[Mapping[str, float]]:
    rows: list[dict[str, float]] = [{} for _ in series.steps]
    for column in SERIES_COLUMNS:
        curves = series.of_column(column.name)
        worst = {f"{column.name}/{curve.router}": curve for curve in _worst_first(curves, column)}
        for index, logged in enumerate(rows):
            numbers = [v for curve in curves if (v := curve.values[index]) is not None]
            if not numbers:
                continue
            logged[f"{column.name}/median"] = statistics.median(numbers)
            if column.worse:
                pick = max if column.worse == "up" else min
                logged[f"{column.name}/worst"] = pick(numbers)
            for name, curve in list(worst.items())[:NUM_WORST]:
                if (value := curve.values[index]) is not None:
                    logged[name] = value
    return rows


def _worst_first(curves: Sequence[Curve], column: SeriesColumn) -> list[Curve]:
    """Those that are known at the last step; none where no direction is bad."""
    current = [c for c in curves if column.worse and c.values[-1] is not None]
    return sorted(current, key=lambda c: c.values[-1] or 0.0, reverse=column.worse == "up")


def _summary(series: Series) -> dict[str, Any]:
    worst = {
        f"{column.name}/worst_router": ranked[0].router
        for column in SERIES_COLUMNS
        if (ranked := _worst_first(series.of_column(column.name), column))
    }
    verdict = {} if series.verdict is None else {"exit_code": series.exit_code}
    return {"num_steps": len(series.steps), **worst, **verdict}


EXPORT = SeriesExport("wandb", write, "wandb", "wandb", target="PROJECT", settings="wandb/settings")
