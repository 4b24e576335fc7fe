"""A CUDA program compiled for the processor, to be called with NumPy arrays."""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from moegeom.kernels.cuda.program import Program
from tests import kernel_cache

HEADER = Path(__file__).with_name("threads_of_a_block.h")

#: Sums are rounded as they are written, as on the device without -fmad. The headers of C++17 take a
#: third of the time, and compilers know ``if constexpr`` without.
OPTIONS = ("-std=c++14", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")

_ENTRY = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^\n]*\)\s*)?(\w+)\(([^)]*)\)', re.S
)


@functools.cache
def compiler() -> tuple[str, str]:
    """The C++ compiler that the tests use, and its version."""
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert path, "the tests run CUDA sources on the processor and need a C++ compiler (c++)"
    return path, subprocess.check_output([path, "--version"], text=True)


def host_text(program: Program) -> str:
    """The program's source behind what stands for CUDA, and a function that starts each kernel."""
    starts = []
    for name, parameters in _ENTRY.findall(program.text):
        names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
        starts.append(
            f'extern "C" void start_{name}(unsigned of_grid, unsigned of_block, {parameters}) {{\n'
            f"    host::run(of_grid, of_block, [=] {{ {name}({names}); }});\n}}\n"
        )
    assert starts, f"no kernel in {program.parts}"
    return f'#include "{HEADER.name}"\n{program.text}\n{"".join(starts)}'


@functools.cache
def host_function(program: Program) -> ctypes._CFuncPtr:
    """The compiled kernel; it stays in a folder of all workers and runs, named by what it is made of."""
    text, (path, version) = host_text(program), compiler()
    made_of = "\0".join([version, *OPTIONS, HEADER.read_text("utf-8"), text])
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:20]
    library = kernel_cache.folder() / f"{program.entry}-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, built = Path(folder) / "program.cpp", Path(folder) / "program.so"
            source.write_text(text, "utf-8")
            command = [path, *OPTIONS, f"-I{HEADER.parent}", "-o", str(built), str(source)]
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr[:4000]
            built.replace(library)
    return getattr(ctypes.CDLL(str(library)), f"start_{program.entry}")


def host_call(program: Program, grid: int, block: int, arguments: tuple) -> None:
    """Runs the kernel on arrays and NumPy scalars, as a device would."""
    given = [ctypes.c_uint(grid), ctypes.c_uint(block), *map(_argument, arguments)]
    host_function(program)(*given)


def _argument(value: object) -> object:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    assert isinstance(value, np.int64 | np.float64 | np.int32), type(value)
    return np.ctypeslib.as_ctypes_type(value.dtype)(value.item())
