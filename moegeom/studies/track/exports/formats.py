"""A series as a table, TensorBoard events, and a run of Weights & Biases."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moegeom.core.files import write_whole, writing
from moegeom.core.series import SERIES_COLUMNS, Curve, Series, SeriesColumn
from moegeom.studies.track.exports import SeriesExport, series_rows


def write_csv(series: Series, path: Path) -> None:
    """Columns router, step, checkpoint, figure, value, standard_error; unknown is empty."""
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["router", "step", "checkpoint", "figure", "value", "standard_error"])
    for router, step, name, column, *numbers in series_rows(series):
        texts = ("" if number is None else repr(number) for number in numbers)
        lines.writerow([router, f"{step:g}", name, column, *texts])
    write_whole(path, text.getvalue())


CSV = SeriesExport("csv", write_csv)


def write_tensorboard(series: Series, path: Path) -> None:
    """A scalar ``<figure>/<router>`` at each step, into the folder ``path``."""
    # classes that protobuf makes when the module is loaded: no type checker sees them
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    event, summary = vars(event_pb2)["Event"], vars(summary_pb2)["Summary"]
    with writing(path):
        writer = EventFileWriter(str(path))
    for index, step in enumerate(series.steps):
        scalars = [
            summary.Value(tag=f"{curve.column}/{curve.router}", simple_value=value)
            for curve in (*series.curves, *series.expert_loads)
            if (value := curve.values[index]) is not None
        ]
        writer.add_event(
            # the step is the only time that checkpoints have; runs of equal steps line up
            event(wall_time=step.step, step=int(step.step), summary=summary(value=scalars))
        )
    writer.close()


TENSORBOARD = SeriesExport("tensorboard", write_tensorboard, "tensorboard", "tensorboard")


#: Routers with a curve of their own, of each figure that has a bad direction.
NUM_WORST = 3


def write_wandb(series: Series, project: str) -> None:
    """A run in ``project`` (or ``entity/project``), as wandb itself is set up.

    Each step has ``<figure>/median`` over the routers, ``<figure>/worst``, and for the routers that
    are worst at the last step ``<figure>/<router>``. The summary names the worst router of each
    figure, the steps and the verdict. Rows by expert stay in the results.
    """
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
    return {"num_steps": len(series.steps), **worst, "exit_code": series.exit_code}


WANDB = SeriesExport(
    "wandb", write_wandb, "wandb", "wandb", target="PROJECT", settings="wandb/settings"
)
