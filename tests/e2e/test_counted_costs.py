"""Commands do no more work than is written down: counted, not timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = "benchmarks/commands_do_no_more_than_counted.py"
PYTHON = json.loads(Path("benchmarks/counted_costs.json").read_text())["versions"]["python"]


@pytest.mark.skipif(
    ".".join(map(str, sys.version_info[:2])) != PYTHON,
    reason=f"calls were counted with Python {PYTHON}; others make other calls",
)
def test_commands_call_hold_read_and_write_what_is_written_down() -> None:
    """In a process of its own: here shapes are looked at, which are calls too."""
    ran = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (
        f"{ran.stdout}{ran.stderr}\nLess work, or work that is meant: python {BENCHMARK} --write"
    )
