"""Parts of a scan on the workers of a Ray cluster."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from moegeom.core.errors import InternalError, MoeGeomError, UsageError, first_line
from moegeom.core.extras import refuse_absent
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.parts import MergedParts, MissingParts, parameters_of_part
from moegeom.engine.request import ScanRequest, Watch

#: Parts for each processor of the cluster: more even than one, and little more to merge.
_PARTS_PER_PROCESSOR = 2

_MOST_PARTS = 1024

#: How often a part is begun again whose worker died.
_RETRIES = 5

#: Makes one part, and gives its files back by name.
MakePart = Callable[[ScanRequest], dict[str, bytes]]


@contextmanager
def parts_by_ray(
    request: ScanRequest, source: TokenSource | None, make: MakePart, watch: Watch | None
) -> Iterator[MergedParts]:
    """The parts of the request, each folded by a worker of ``request.engine``.

    ``ray`` is a cluster of the processors here, ``ray:ADDRESS`` one that runs already, whose
    workers reach checkpoint and tokens by the same paths. A part whose worker dies is begun again.

    Raises
    ------
    UsageError
        For another engine, without ray, and where there are no tokens to cut.
    MoeGeomError
        What a part ends with.
    """
    name, _, address = (request.engine or "").partition(":")
    if name != "ray":
        raise UsageError(f"--engine {request.engine}: expected ray or ray:ADDRESS.")
    if source is None:
        raise UsageError("--engine cuts tokens: it needs --tokens.")
    parameters_of_part(request)
    with _connected(address) as ray, tempfile.TemporaryDirectory(prefix="moegeom-") as folder:
        tiles = -(-source.facts.num_tokens // TILE)
        processors = int(ray.cluster_resources().get("CPU", 1))
        count = max(min(tiles, _PARTS_PER_PROCESSOR * processors, _MOST_PARTS), 1)
        if watch:
            watch.say(f"{number_of(count, 'part')} on {number_of(processors, 'processor')} of Ray")
            watch.start(count)
            watch.begin("parts")
        alone = dataclasses.replace(
            request, engine=None, restart=False, overwrite=False, device="cpu", num_workers=1
        )
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_told)
        waiting = {
            task.remote(make, dataclasses.replace(alone, part=f"{number}/{count}")): number
            for number in range(1, count + 1)
        }
        folders = {number: Path(folder) / f"{number:04d}" for number in waiting.values()}
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            _keep(folders[waiting.pop(done)], _got(ray, done))
            if watch:
                watch.advance(1)
        parts = MergedParts.of(list(folders.values()))
        if isinstance(parts, MissingParts):
            raise InternalError(f"Ray gave back all parts but {parts.numbers[:10]}")
        yield parts


def _told(make: MakePart, request: ScanRequest) -> dict[str, bytes] | MoeGeomError:
    """Errors of ours are answers: Ray begins again only what its worker did not survive."""
    try:
        return make(request)
    except MoeGeomError as error:
        return error


def _got(ray: Any, done: Any) -> Mapping[str, bytes]:
    try:
        outcome = ray.get(done)
    except ray.exceptions.RayError as error:
        raise UsageError(
            f"--engine ray: a part failed {_RETRIES + 1} times ({first_line(error)[:300]}).",
            "Look at the logs of Ray; parts that are done are not kept.",
        ) from None
    if isinstance(outcome, MoeGeomError):
        raise outcome
    return outcome


def _keep(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


class _NoFolders(list[str]):
    """Where workers look for modules before what is installed: nowhere. Ray adds the working
    directory, which may hold what is judged.
    """

    def extend(self, folders: Iterable[str]) -> None:
        """Adds nothing."""


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected; a cluster that was begun here ends here, and reports nothing to anybody."""
    refuse_absent("ray", "ray", "--engine ray")
    import ray
    from ray.job_config import JobConfig

    if ray.is_initialized():
        yield ray
        return
    config = JobConfig()
    config._py_driver_sys_path = _NoFolders()
    with mock.patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0"}):
        try:
            ray.init(
                address=address or "local",
                job_config=config,
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"--engine {'ray:' + address if address else 'ray'}: no cluster "
                f"({first_line(error)[:300]}).",
                "ray start --head begins one; its address is printed.",
            ) from None
    try:
        yield ray
    finally:
        ray.shutdown()
