"""TensorBoard event files, written by TensorBoard's own writer."""

from __future__ import annotations

from pathlib import Path

from moegeom.core.files import writing
from moegeom.core.series import Series
from moegeom.studies.track.export import SeriesExport


def write(series: Series, path: Path) -> None:
    """A scalar ``<figure>/<router>`` at each step, into the folder ``path``.

    Raises
    ------
    UsageError
        When TensorBoard is not installed.
    """
    EXPORT.refuse_absent()
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


EXPORT = SeriesExport("tensorboard", write, "tensorboard", "tensorboard")
