"""Answers that several tests look at: made once in a run, by the worker that needs them first.

``@shared`` goes before a function whose arguments say all that it depends on, and whose value is a
record (a ``Report`` of a study on a sample, say), or the path of a folder that it has written into
``new_folder()``. Nobody changes what it returns: other tests read it, too.
"""

import functools
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock

P, T = ParamSpec("P"), TypeVar("T")

#: Where the workers of a run find each other's records.
RUN = "MOEGEOM_TEST_RUN"


def new_folder() -> Path:
    """An empty folder, which is there until the run has ended."""
    return Path(tempfile.mkdtemp(dir=os.environ[RUN]))


def shared(make: Callable[P, T]) -> Callable[P, T]:
    """``make``, run once for the same arguments in all processes of a run of the tests."""

    @functools.cache
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        key = repr((make.__module__, make.__qualname__, args, sorted(kwargs.items())))
        file = Path(os.environ[RUN]) / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.pickle"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                value = make(*args, **kwargs)
                file.with_suffix(".new").write_bytes(pickle.dumps(value))
                file.with_suffix(".new").replace(file)
                return value
        return pickle.loads(file.read_bytes())

    return functools.wraps(make)(answer)
