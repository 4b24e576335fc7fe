"""From a program to machine code, by NVRTC, which needs no GPU.

CuPy's own kernels are compiled with ``-ftz=true`` whatever is asked, which makes every subnormal
number zero and so ties what is not tied. Here nothing is added to :data:`OPTIONS`. A program takes
less than a second, so none is kept on a disk.
"""

from __future__ import annotations

from typing import Any

from moegeom.kernels.cuda.device import DeviceError
from moegeom.kernels.cuda.program import OPTIONS, Program


def nvrtc() -> Any:
    """CuPy's bindings of the compiler, which is loaded when it is first asked."""
    from cupy.cuda import nvrtc as bindings

    return bindings


def architecture_for(device: str, major: int, minor: int) -> str:
    """The latest machine code that NVRTC writes and a GPU of this compute capability runs.

    Code runs on later GPUs of the same ``major`` number. ``device`` is named in the error.

    Raises
    ------
    DeviceError
        When NVRTC writes none.
    """
    known = nvrtc().getSupportedArchs()
    fit = [arch for arch in known if 10 * major <= arch <= 10 * major + minor]
    if not fit:
        version = ".".join(map(str, nvrtc().getVersion()))
        raise DeviceError(
            f"NVRTC {version} writes no code for {device}, compute capability {major}.{minor}; "
            f"it knows {known[0]} to {known[-1]}.",
            "Install CuPy for the CUDA version that the GPU needs (moegeom[cuda12], [cuda13]).",
        )
    return f"sm_{max(fit)}"


def compile_program(
    program: Program, architecture: str, more_options: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Machine code, and what the compiler says about it.

    Raises
    ------
    DeviceError
        With the first lines of what the compiler says, when it does not compile.
    """
    compiler = nvrtc()
    handle = compiler.createProgram(program.text, f"{program.entry}.cu", (), ())
    try:
        options = (*OPTIONS, f"--gpu-architecture={architecture}", *more_options)
        try:
            compiler.compileProgram(handle, options)
        except compiler.NVRTCError as error:
            said = " ".join(_log(handle).split()[:60])
            raise DeviceError(
                f"NVRTC does not compile {program.entry} for {architecture} ({error}): {said}"
            ) from None
        return compiler.getCUBIN(handle), _log(handle)
    finally:
        compiler.destroyProgram(handle)


def _log(handle: int) -> str:
    return nvrtc().getProgramLog(handle).rstrip("\0")
