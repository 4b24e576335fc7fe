"""The engine of devices costs no time to import, and CuPy is there only once a device is opened."""

import json
import subprocess
import sys
from pathlib import Path

import moegeom

#: What takes long to import, or needs not be installed.
HEAVY = ("numba", "torch", "scipy", "sklearn", "pandas", "matplotlib", "cupy", "cupyx")

PACKAGE = Path(moegeom.__file__).parent

#: Imports modules, and says for each heavy package which module asked for it first.
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
for name in sys.argv[1].split(","): __import__(name)
print(json.dumps({name: by[name] for name in by if name in sys.modules}))
"""


def loaded_by(*modules: str, heavy: tuple[str, ...] = HEAVY) -> dict[str, str]:
    """Heavy packages that are loaded with modules, and what imports them."""
    command = [sys.executable, "-c", SCRIPT, ",".join(modules), *heavy]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_module_of_the_devices_loads_anything_heavy_and_one_that_does_is_named():
    modules = [
        f"moegeom.{folder.replace('/', '.')}.{file.stem}"
        for folder in ("kernels/cuda", "engine/devices")
        for file in (PACKAGE / folder).glob("[a-z]*.py")
    ]
    assert len(modules) >= 10 and "moegeom.engine.devices.cuda" in modules
    assert loaded_by(*modules) == {}
    seen = loaded_by("moegeom.core.router", heavy=("numpy",))
    assert seen["numpy"].startswith("moegeom.")
