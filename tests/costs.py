"""What a run of the tests took, in seconds of the processor: by folder, and the dearest tests.

Where time goes is read from it; no test fails by it. What commands took in the warm process of
``tests/e2e`` is reported by that process.
"""

import collections
import os
from collections.abc import Iterable

import pytest

from tests.by_day import left_for_the_night

#: So many tests are named, and all beyond so many seconds.
SLOWEST, TOO_SLOW = 10, 5.0

#: Seconds of children that other processes wait for.
elsewhere = [0.0]


def spent() -> float:
    """Seconds of this process and of its children."""
    return sum(os.times()[:4]) + elsewhere[0]


class Costs:
    """A plugin: on a worker it measures, where reports arrive it tells."""

    def __init__(self) -> None:
        self._last = spent()
        self._of_tests: collections.Counter[str] = collections.Counter()
        self._left = [0, 0, 0]
        self._of_workers: list[int] | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterable[None]:
        report = yield
        now = spent()
        report.processor_seconds, self._last = now - self._last, now
        return report

    def pytest_collection_finish(self) -> None:
        self._last = spent()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left[2] += len(items)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._left[:2] = len(left_for_the_night), sum(left_for_the_night)
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_for_the_night"] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", None) or {}
        self._of_workers = output.get("left_for_the_night", self._left)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        folders: collections.Counter[str] = collections.Counter()
        for name, seconds in self._of_tests.items():
            parts = name.partition("::")[0].split("/")[1:-1]
            folders["/".join(parts[:2]) if parts[:1] == ["unit"] else "/".join(parts[:1])] += (
                seconds
            )
        total = sum(folders.values())
        terminalreporter.section(f"processor seconds: {total:.0f}")
        write(", ".join(f"{name} {seconds:.0f}" for name, seconds in folders.most_common()))
        for place, (name, seconds) in enumerate(self._of_tests.most_common()):
            if place < SLOWEST or seconds > TOO_SLOW:
                write(f"{seconds:6.1f}  {name}")
        lists, cases, tests = self._of_workers or self._left
        if lists or tests:
            write(
                f"left for the night (make test-all): {cases} cases of {lists} lists,"
                f" {tests} tests marked nightly"
            )
