"""A kernel is kept where it can be; one that is compiled is told once, one that is there is not."""

from pathlib import Path

import pytest
from numba import njit
from numba.core import event

import moegeom
from moegeom.kernels.cpu import compilation, kernel
from moegeom.kernels.cpu.compilation import stopwatch, told_once


def test_the_first_compilation_is_told_and_no_later_one():
    def twice(x):
        return 2 * x

    first, second, told = njit(twice), njit(twice), []
    with told_once(told.append):
        assert first(1) == 2
        assert len(told) == 1
        assert second(1.0) == 2.0
    with told_once(told.append):
        assert first(3) == 6
    assert njit(lambda x: x + 1)(1) == 2  # nobody listens any more
    assert len(told) == 1


TRIPLE = "def triple(x):\n    return 3 * x\n"


def triple_in(path: Path):
    """The function as its file, which need not be there, would define it."""
    found = {}
    exec(compile(TRIPLE, str(path), "exec"), found)
    return found["triple"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kernel_works_and_says_whether_it_is_kept(is_there, tmp_path):
    # without a source there is no place to keep it, as where no folder can be written
    path, told = tmp_path / "triple.py", []
    if is_there:
        path.write_text(TRIPLE)
    with told_once(told.append):
        assert kernel()(triple_in(path))(2) == 6
    assert told == [is_there]
    assert bool(list(tmp_path.rglob("*.nbc"))) == is_there
    with told_once(told.append):
        assert kernel()(triple_in(path))(2) == 6
    assert len(told) == 1 if is_there else told == [False, False]


def test_no_kernel_insists_on_being_kept():
    sources = Path(moegeom.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "cache=True" in path.read_text("utf-8")] == []


def test_the_time_of_compiling_is_no_time_of_the_work(monkeypatch):
    clock = iter(range(100, 10_000, 7))
    monkeypatch.setattr(compilation.time, "perf_counter", clock.__next__)
    monkeypatch.setattr(event, "timer", clock.__next__)
    with stopwatch() as took:
        pass
    assert took.seconds == 7
    with stopwatch() as took, event.trigger_event("numba:compile"):
        next(clock)  # what is compiled on the way belongs to it
        with event.trigger_event("numba:compile"):
            pass
    assert took.seconds == 2 * 7
