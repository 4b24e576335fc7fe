"""A GPU through CuPy: memory, queues, cuBLAS products, and kernels compiled when first used."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError, first_line
from moegeom.core.extras import install_command
from moegeom.core.tokens import gpu_of
from moegeom.kernels.cuda.device import Device, DeviceArray, DeviceError, OutOfDeviceMemory
from moegeom.kernels.cuda.program import OPTIONS, Program

#: Numbers of ``cudaDataType``.
_FLOAT32, _BFLOAT16 = 0, 14

#: A pointer to nothing, as an argument of a kernel.
_NULL = np.uint64(0)

#: Errors of CuPy, by class and status, that say that memory is short: of the host too, when it is
#: pinned (cudaErrorMemoryAllocation, CUBLAS_STATUS_ALLOC_FAILED).
_NO_ROOM = {("CUDARuntimeError", 2), ("CUBLASError", 3)}

#: Bytes that kernels read in one piece.
_ALIGNED = 16

#: What to install for lack of cuBLAS or NVRTC.
_LIBRARIES = 'pip install "cupy-cuda13x[ctk]" brings them (or cupy-cuda12x[ctk]).'


def _install() -> str:
    """The command that installs CuPy."""
    return f"{install_command('cuda13')} (or cuda12, whichever the driver can run)"


def count_devices() -> int:
    """GPUs that CuPy sees.

    Raises
    ------
    DeviceError
        With the reason, when there is no CuPy or no driver.
    """
    if importlib.util.find_spec("cupy") is None:
        raise DeviceError("No GPU can be used: CuPy is not installed.", _install())
    try:
        import cupy
    except ImportError as error:
        # CuPy frames what Python said with a page of its own
        reason = first_line(error.__cause__ or error).rstrip(".")
        raise DeviceError(
            f"No GPU can be used: CuPy cannot be imported: {reason}.", _install()
        ) from None
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"No GPU was found; CuPy says: {str(error).rstrip('.')}.",
            "`nvidia-smi` tells which GPU and driver are there; the driver must be able to run the "
            "CUDA of CuPy (extra cuda12 or cuda13).",
        ) from None


@functools.cache
def open_device(index: int) -> Device:
    """The GPU of this number.

    Raises
    ------
    DeviceError
        When there is none.
    """
    count = count_devices()
    if not 0 <= index < count:
        devices = "none" if not count else "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DeviceError(f"There is no device cuda:{index}; found {devices}.")
    return _CupyDevice(index)


def first_device() -> Device:
    """Device 0."""
    return open_device(0)


@contextmanager
def _translated() -> Iterator[None]:
    """Raises errors of CUDA as errors of moegeom."""
    import cupy

    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"The device has no room left: {error}.") from None
    except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
        # those of the runtime, the driver, cuBLAS and NVRTC have no other base in common
        if (type(error).__name__, getattr(error, "status", None)) in _NO_ROOM:
            raise OutOfDeviceMemory(f"There is no room left: {error}.") from None
        raise DeviceError(f"The device failed: {error}.") from None


def need_libraries() -> None:
    """Loads cuBLAS and NVRTC, which CuPy looks for when they are first used.

    Raises
    ------
    DeviceError
        When one is missing: better now than in the middle of a scan.
    """
    try:
        _cublas()
        nvrtc().getVersion()
    except (ImportError, RuntimeError) as error:
        reason = first_line(error).rstrip(".")
        raise DeviceError(
            f"No GPU can be used: cuBLAS or NVRTC, libraries of CUDA, cannot be loaded ({reason}).",
            _LIBRARIES,
        ) from None


class _CupyDevice:
    def __init__(self, index: int) -> None:
        import cupy

        need_libraries()
        self.index = index
        self._lock = threading.Lock()
        with _translated():
            facts = cupy.cuda.runtime.getDeviceProperties(index)
            self.name = facts["name"].decode()
            self._architecture = architecture_for(self.name, facts["major"], facts["minor"])
        self._kernels: dict[Program, Future[Any]] = {}
        self._compilers = ThreadPoolExecutor(2, "moegeom-compile")

    @contextmanager
    def current(self) -> Iterator[Any]:
        """CuPy, with this device as the current one."""
        import cupy

        with _translated(), cupy.cuda.Device(self.index):
            yield cupy

    def free_bytes(self) -> int:
        with self.current() as cupy:
            return cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        with self.current() as cupy:
            return cupy.empty(shape, dtype)

    def put(self, array: np.ndarray) -> DeviceArray:
        with self.current() as cupy:
            copy = cupy.asarray(array, order="C")
            cupy.cuda.get_current_stream().synchronize()
            return copy

    def get(self, array: DeviceArray) -> np.ndarray:
        with self.current() as cupy:
            return cupy.asnumpy(array)

    def has(self, tensor: Any) -> bool:
        return gpu_of(tensor) == self.index

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        with self.current():
            import cupyx

            return cupyx.empty_pinned(shape, dtype)  # pyright: ignore[reportArgumentType]

    def kernel(self, program: Program) -> Any:
        """The compiled kernel, loaded on this device once."""
        self.compile([program])
        return self._kernels[program].result()

    def compile(self, programs: Collection[Program]) -> None:
        with self._lock:
            for program in programs:
                if program not in self._kernels:
                    self._kernels[program] = self._compilers.submit(self._compiled, program)

    def _compiled(self, program: Program) -> Any:
        with self.current() as cupy:
            code, _ = compile_program(program, self._architecture)
            module = cupy.cuda.Module()
            module.load(code)
            return module.get_function(program.entry)

    def queue(self) -> _CupyQueue:
        return _CupyQueue(self)


class _CupyQueue:
    """A stream with a cuBLAS handle of its own, so that products of queues share no workspace.

    cuBLAS gives the same bits for the same shapes where one stream uses a handle.
    """

    def __init__(self, device: _CupyDevice) -> None:
        self._device, self._handle = device, 0
        with device.current() as cupy:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    @contextmanager
    def current(self) -> Iterator[Any]:
        with self._device.current() as cupy, self._stream:
            yield cupy

    def __del__(self) -> None:
        # when the interpreter ends nothing can be imported, and everything goes by itself
        if self._handle and not sys.is_finalizing():
            with self._device.current():
                _cublas().destroy(self._handle)

    def upload(self, to: DeviceArray, values: np.ndarray) -> None:
        with self.current():
            to.set(values, stream=self._stream)

    def fill(self, array: DeviceArray, byte: int) -> None:
        with self.current() as cupy:
            cupy.cuda.runtime.memsetAsync(array.data.ptr, byte, array.nbytes, self._stream.ptr)

    def adopt(self, tensor: Any) -> DeviceArray:
        with _exporting():
            _refuse_foreign(tensor, self._device.index)
        if type(tensor).__module__.partition(".")[0] == "cupy":
            with self._device.current() as cupy:
                # it is exported to the stream that is current then: that of this queue, which would
                # wait for itself
                self._stream.wait_event(cupy.cuda.get_current_stream().record())
        with self.current() as cupy:
            with _exporting():
                array = cupy.from_dlpack(tensor)
            # CuPy names bfloat16 by the dtype of ml_dtypes; here it is its bits
            if array.dtype.name == "bfloat16":
                array = array.view(np.uint16)
            array = cupy.ascontiguousarray(array)
            # a tensor may begin anywhere in memory of its own
            return array.copy() if array.data.ptr % _ALIGNED else array

    def launch(self, program: Program, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        operands = tuple(_NULL if value is None else value for value in arguments)
        kernel = self._device.kernel(program)
        with self.current():
            kernel((grid, 1, 1), (block, 1, 1), operands)

    def product(self, out: DeviceArray, values: DeviceArray, rows: DeviceArray) -> None:
        kind = _FLOAT32 if values.dtype == np.float32 else _BFLOAT16
        tokens, hidden = values.shape
        with self.current():
            cublas = _cublas()
            if not self._handle:
                self._handle = cublas.create()
            # cuBLAS counts by columns: out^T = rows values^T, both operands with hidden fastest
            cublas.gemmEx(
                self._handle,
                cublas.CUBLAS_OP_T,
                cublas.CUBLAS_OP_N,
                len(rows),
                tokens,
                hidden,
                self._one.ctypes.data,
                rows.data.ptr,
                kind,
                hidden,
                values.data.ptr,
                kind,
                hidden,
                self._zero.ctypes.data,
                out.data.ptr,
                _FLOAT32,
                len(rows),
                cublas.CUBLAS_COMPUTE_32F,
                cublas.CUBLAS_GEMM_DEFAULT,
            )

    def finish(self) -> None:
        with self._device.current():
            self._stream.synchronize()


@contextmanager
def _exporting() -> Iterator[None]:
    """What another library says of a tensor that it does not export; failures of a device pass."""
    try:
        yield
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        if hasattr(error, "status"):
            raise
        raise UsageError(f"A tensor cannot be taken by DLPack: {error}.") from None


def _refuse_foreign(tensor: Any, index: int) -> None:
    """Tensors of the host or of another GPU cannot be read from this one."""
    if not hasattr(tensor, "__dlpack_device__"):
        raise UsageError(
            f"A {type(tensor).__name__} was given; expected a tensor that knows DLPack."
        )
    number = gpu_of(tensor)
    if number != index:
        where = "no GPU" if number is None else f"cuda:{number}"
        raise UsageError(f"The tensor is on {where}; expected one on cuda:{index}.")


def _cublas() -> Any:
    """CuPy's bindings, which it does not document: this module alone knows them."""
    import cupy

    return cupy.cuda.cublas  # looks for the library in packages too, as an import would not


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
    architectures = nvrtc().getSupportedArchs()
    fit = [arch for arch in architectures if 10 * major <= arch <= 10 * major + minor]
    if not fit:
        version = ".".join(map(str, nvrtc().getVersion()))
        raise DeviceError(
            f"NVRTC {version} writes no code for {device}, compute capability {major}.{minor}; "
            f"it knows {architectures[0]} to {architectures[-1]}.",
            "Install CuPy for the CUDA version that the GPU needs (extra cuda12 or cuda13).",
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
            log = " ".join(_log(handle).split()[:60])
            raise DeviceError(
                f"NVRTC does not compile {program.entry} for {architecture} ({error}): {log}"
            ) from None
        return compiler.getCUBIN(handle), _log(handle)
    finally:
        compiler.destroyProgram(handle)


def _log(handle: int) -> str:
    return nvrtc().getProgramLog(handle).rstrip("\0")
