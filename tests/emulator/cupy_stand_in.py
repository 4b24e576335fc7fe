"""What the adapter asks of CuPy, on memory of the host, so that its own lines are run without a GPU.

Whatever it is asked for is done at once; that work comes late is the business of the emulated
device. The stand-in is strict about what CuPy leaves to its caller: the current device and stream,
sizes that fit, and the column order of cuBLAS, which works on bare addresses here as there.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.kernels.cuda.program import Program
from tests.emulator.emulated_device import EmulatedArray, EmulatedDevice, plain
from tests.emulator.host_program import host_call

NULL_STREAM = "the null stream"

#: Operands of cuBLAS by the number of their type.
_TYPES = {0: np.dtype(np.float32), 14: np.dtype(ml_dtypes.bfloat16)}


class Array(np.ndarray):
    """Memory of the device."""

    holder: EmulatedArray

    def __array_function__(self, function, types, arguments, given):
        made = function(*plain(arguments), **{name: plain(value) for name, value in given.items()})
        return made.view(Array) if isinstance(made, np.ndarray) else made

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        assert not isinstance(arr, Array) and arr.flags.c_contiguous
        assert (arr.shape, arr.dtype) == (self.shape, self.dtype)
        assert stream is not None
        np.copyto(self, arr)

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        if out is None:
            return np.array(self, subok=False)
        assert not isinstance(out, Array) and out.flags.c_contiguous
        assert (out.shape, out.dtype) == (self.shape, self.dtype)
        assert stream is not None and not blocking
        np.copyto(out, np.asarray(self))
        return out


class Tensor:
    """A tensor of another library on device ``number``."""

    def __init__(self, held: np.ndarray, number: int = 0, kind: int = 2) -> None:
        self.held, self.number, self.kind = held, number, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.number


class CupyStandIn:
    """The module ``cupy``; one device is its current one, whichever it is."""

    def __init__(self, room: int = 2**33) -> None:
        self.memory = EmulatedDevice(room)
        self.programs: list[Program] = []
        self.waited_for: list[Any] = []
        self.handles = 0
        self._device: list[int] = []
        self._stream: list[Any] = []
        outer = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                outer._device.append(self.index)

            def __exit__(self, *_: object) -> None:
                outer._device.pop()

        class Stream:
            ptr = 4711

            def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
                assert outer.device is not None and non_blocking

            def __enter__(self) -> None:
                outer._stream.append(self)

            def __exit__(self, *_: object) -> None:
                outer._stream.pop()

            def wait_event(self, event: Any) -> None:
                outer.waited_for.append(event)

            def synchronize(self) -> None:
                assert outer.device is not None

        class OutOfMemoryError(MemoryError):
            pass

        class CUDARuntimeError(RuntimeError):
            pass

        self.cuda = SimpleNamespace(
            Device=Device,
            Stream=Stream,
            Module=lambda: _Module(self),
            get_current_stream=lambda: self.stream,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=lambda: 2,
                getDeviceProperties=lambda index: {"name": b"stand-in", "major": 9, "minor": 0},
                memGetInfo=lambda: (self.memory.free_bytes(), self.memory.room),
                memsetAsync=self._memset,
            ),
            cublas=SimpleNamespace(
                CUBLAS_OP_N=0,
                CUBLAS_OP_T=1,
                CUBLAS_COMPUTE_32F=68,
                CUBLAS_GEMM_DEFAULT=-1,
                create=self._create,
                destroy=self._destroy,
                gemmEx=self._gemm,
            ),
        )

    @property
    def device(self) -> int | None:
        return self._device[-1] if self._device else None

    @property
    def stream(self) -> Any:
        null = SimpleNamespace(synchronize=lambda: None, record=lambda: NULL_STREAM)
        return self._stream[-1] if self._stream else null

    def compile(self, program: Program, architecture: str) -> tuple[bytes, str]:
        """In place of machine code, the number of the program."""
        assert architecture == "sm_90"
        self.programs.append(program)
        return str(len(self.programs) - 1).encode(), ""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        assert self.device is not None
        try:
            holder = self.memory.empty(shape, dtype)
        except OutOfDeviceMemory as error:
            raise self.cuda.memory.OutOfMemoryError(str(error)) from None
        made = holder.view(np.ndarray).view(Array)
        made.holder = holder  # whose end gives the memory back
        return made

    def asarray(self, array: np.ndarray, order: str = "K") -> Array:
        made = self.empty(array.shape, array.dtype)
        if order == "C":
            np.copyto(made, array)
        else:  # the bytes as they lie there
            np.copyto(made.reshape(-1), array.ravel(order="K"))
        return made

    def asnumpy(self, array: Array) -> np.ndarray:
        assert self.device is not None
        return np.array(array, subok=False)

    def from_dlpack(self, tensor: Any) -> Array:
        assert self._stream, "the export must wait for the queue's own stream"
        return tensor.held.view(Array)

    def ascontiguousarray(self, array: Array) -> Array:
        assert array.dtype.name != "bfloat16", "CuPy would need headers of CUDA for this"
        return np.ascontiguousarray(array).view(Array)

    def get_default_memory_pool(self) -> SimpleNamespace:
        return SimpleNamespace(free_bytes=lambda: 0)

    def _memset(self, pointer: int, byte: int, size: int, stream: int) -> None:
        assert self.device is not None and stream == self.stream.ptr
        ctypes.memset(pointer, byte, size)

    def _create(self) -> int:
        assert self.device is not None
        self.handles += 1
        return 99

    def _destroy(self, handle: int) -> None:
        assert handle == 99
        self.handles -= 1

    def _gemm(
        self, handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta,
        c, c_type, ldc, compute, algorithm,
    ) -> None:  # fmt: skip
        """C = op(A) op(B), all by columns; sums exactly, and rounds once."""
        assert self._stream and (handle, transa, transb) == (99, 1, 0)
        assert (c_type, compute, algorithm) == (0, 68, -1) and a_type == b_type
        scalars = [ctypes.cast(p, ctypes.POINTER(ctypes.c_float))[0] for p in (alpha, beta)]
        assert scalars == [1.0, 0.0]
        left, right = (
            _at(p, (count, stride), _TYPES[kind])[:, :k].astype(np.float64)
            for p, count, stride, kind in ((a, m, lda, a_type), (b, n, ldb, b_type))
        )
        with np.errstate(invalid="ignore", over="ignore"):
            _at(c, (n, ldc), _TYPES[c_type])[:, :m] = right @ left.T


def _at(pointer: int, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """The numbers at an address."""
    size = shape[0] * shape[1] * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)


class _Module:
    def __init__(self, cupy: CupyStandIn) -> None:
        self._cupy, self._program = cupy, None

    def load(self, code: bytes) -> None:
        assert self._cupy.device is not None
        self._program = self._cupy.programs[int(code)]

    def get_function(self, name: str) -> Any:
        program = self._program
        assert program is not None and name == program.entry

        def function(grid: tuple, block: tuple, args: tuple) -> None:
            assert self._cupy._stream, "launched on the null stream"
            assert grid[1:] == block[1:] == (1, 1) and grid[0] > 0
            host_call(program, grid[0], block[0], tuple(map(_argument, args)))

        return function


def _argument(value: Any) -> Any:
    """Arrays and numbers as they come; an address is that of nothing."""
    if isinstance(value, np.uint64):
        assert value == 0
        return None
    assert isinstance(value, Array | np.int64 | np.float64), type(value)
    return value
