"""Which worker of pytest-xdist runs what: what shares fixtures, trees or compiled kernels stays together.

A folder with a ``conftest.py`` is one piece of work, every other file one of its own: what they
build is built once, not once for each worker. Kernels are compiled by the first who calls them, and
come from Numba's cache afterwards: one worker begins with the tests that call them all, the others
with what calls none.
"""

from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).resolve().parents[1]

#: Where work begins, in this order: the first folder compiles, the second parses every module, and
#: models of transformers give it time, so that commands find kernels compiled.
FIRST = ("tests/parity", "tests/architecture", "tests/families", "tests/e2e", "tests/fuzz")

#: Folders that stay whole without a ``conftest.py``.
WHOLE = FIRST[:2]

#: Folders that run models of transformers: one worker imports their classes.
MODELS = ("tests/families/", "tests/unit/capture/", "tests/unit/trainable/")


def piece_of(nodeid: str) -> str:
    """The folder or the file that goes to one worker, or the folders with models."""
    file = nodeid.partition("::")[0]
    if file.startswith(MODELS):
        return MODELS[0].rstrip("/")
    for folder in Path(file).parents[:-2]:  # not tests/ itself
        if folder.as_posix() in WHOLE or (ROOT / folder / "conftest.py").exists():
            return folder.as_posix()
    return file


def place_of(piece: str, num_tests: int) -> tuple[int, bool, int]:
    """Where a piece stands in the queue: whole folders early, small files at the end."""
    at = [place for place, folder in enumerate(FIRST) if Path(piece).is_relative_to(folder)]
    return min(at, default=len(FIRST)), piece.endswith(".py"), -num_tests


class Pieces(LoadScopeScheduling):
    """Pieces in their order, each to the worker that is free first."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        queue = self.workqueue
        queue.move_to_end(min(queue, key=lambda one: place_of(one, len(queue[one]))), last=False)
        super()._assign_work_unit(node)
