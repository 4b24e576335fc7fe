"""What an image compiles when it is built is what its commands need, and commands do no more work
than is written down: counted, not timed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.short_samples import short_samples

#: Signatures of kernels that commands need beyond those compiled before, in a new process.
SCRIPT = """
import json, sys
from pathlib import Path
import moegeom
from moegeom.kernels.cpu.compilation import kernels
from moegeom.testing.compile_kernels import compile_kernels

def there():
    return {(kernel.__name__, str(s)) for kernel in kernels() for s in kernel.signatures}

samples, out, *commands = sys.argv[1:]
for command in commands:
    before = there()
    if command == "compile":
        compile_kernels()
    elif command == "cells":
        sample = f"{samples}/olmoe-balanced/step_1500"
        moegeom.cells(sample, layers=1, subspace="random:3", out=out)
    else:
        sample = f"{samples}/{command}"
        moegeom.boundary_report(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=1)
    print(json.dumps([command, sorted(name for name, _ in there() - before)]))
"""


def test_commands_find_their_kernels_compiled(tmp_path):
    commands = ("compile", "olmoe-balanced", "deepseek-tiny", "cells")
    arguments = [str(short_samples()), str(tmp_path / "out"), *commands]
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    #: By command the names of kernels that it needed beyond those of the commands before.
    needed = dict(json.loads(line) for line in ran.stdout.splitlines())
    compiled = needed.pop("compile")
    assert len(compiled) > 30
    assert "advance" in compiled
    assert not any(needed.values()), needed


# ------------------------------------------------------------------------------------ counted costs
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
