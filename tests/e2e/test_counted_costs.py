"""Commands do no more work than is written down: counted, not timed."""

from __future__ import annotations

import subprocess
import sys

import pytest

BENCHMARK = "benchmarks/commands_do_no_more_than_counted.py"


def test_commands_call_hold_read_and_write_what_is_written_down() -> None:
    """In a process of its own: here shapes are looked at, which are calls too."""
    ran = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    if ran.returncode == 2:
        pytest.skip(ran.stdout)
    assert ran.returncode == 0, (
        f"{ran.stdout}{ran.stderr}\nLess work, or work that is meant: python {BENCHMARK} --write"
    )
