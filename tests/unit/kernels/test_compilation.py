"""A kernel that is compiled is told once; one that is there already is not."""

from types import SimpleNamespace

from numba import njit
from numba.core import event

from moegeom.kernels.cpu import compilation
from moegeom.kernels.cpu.compilation import told_once, work_clock


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


def test_the_clock_of_work_stands_still_while_kernels_are_compiled(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(compilation, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with work_clock() as clock:
        now[0] += 1.0
        with event.trigger_event("numba:compile"):
            now[0] += 10.0
            with event.trigger_event("numba:compile"):  # what the kernel calls
                now[0] += 10.0
            assert clock.seconds == 1.0
        now[0] += 2.0
        assert clock.seconds == 3.0
