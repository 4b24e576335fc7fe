"""The engine of devices costs no time to import, and CuPy is there only once a device is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import moegeom

#: What takes long to import, or needs not be installed.
HEAVY = ("numba", "torch", "scipy", "sklearn", "pandas", "matplotlib", "cupy", "cupyx")

PACKAGE = Path(moegeom.__file__).parent

MODULES = [
    *(f"moegeom.kernels.cuda.{file.stem}" for file in (PACKAGE / "kernels/cuda").glob("[a-z]*.py")),
    *(
        f"moegeom.engine.devices.{file.stem}"
        for file in (PACKAGE / "engine/devices").glob("[a-z]*.py")
    ),
]

#: Imports a module, and says for each heavy package which module asked for it first.
SCRIPT = """
import json, sys
heavy, by = sys.argv[2:], {}
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in by:
            frame = sys._getframe()
            while frame and not frame.f_globals.get("__name__", "").startswith("moegeom"):
                frame = frame.f_back
            by[name] = frame.f_globals["__name__"] if frame else "another package"
sys.meta_path.insert(0, Spy())
__import__(sys.argv[1])
print(json.dumps({name: by[name] for name in by if name in sys.modules}))
"""


def loaded_by(module: str) -> dict[str, str]:
    """Heavy packages that are loaded with a module, and what imports them."""
    command = [sys.executable, "-c", SCRIPT, module, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_engine_loads_nothing_heavy():
    assert loaded_by("moegeom.engine.devices.cuda") == {}


def test_no_module_of_the_devices_loads_anything_heavy():
    """All of them in one process: the first that does is named."""
    everything = "import sys\nfor name in sys.argv[1].split(','): __import__(name)"
    script = SCRIPT.replace("__import__(sys.argv[1])", everything)
    command = [sys.executable, "-c", script, ",".join(MODULES), *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {}
    assert len(MODULES) > 10


@pytest.mark.parametrize("module", ["moegeom.kernels.cpu.choice", "scipy.special"])
def test_a_module_that_does_load_something_heavy_is_found(module):
    assert set(loaded_by(module)) & {"numba", "scipy"}
