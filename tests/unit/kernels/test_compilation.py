"""A kernel that is compiled is told once; one that is there already is not."""

from numba import njit
from numba.core import event

from moegeom.kernels.cpu import compilation
from moegeom.kernels.cpu.compilation import stopwatch, told_once


def test_the_first_compilation_is_told_and_no_later_one():
    def twice(x):
        return 2 * x

    first, second, told = njit(twice), njit(twice), []
    with told_once(lambda: told.append("compiling")):
        assert first(1) == 2
        assert told == ["compiling"]
        assert second(1.0) == 2.0
    assert told == ["compiling"]
    with told_once(lambda: told.append("again")):
        assert first(3) == 6
    assert told == ["compiling"]


def test_nobody_is_told_afterwards():
    told = []
    with told_once(lambda: told.append("compiling")):
        pass
    assert njit(lambda x: x + 1)(1) == 2
    assert told == []


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
