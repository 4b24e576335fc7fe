"""A device whose kernels run on the processor and whose queues do their work as late as they may.

Work is kept until somebody waits, and queues take turns in an order drawn at random. So a buffer
that is filled again before it was read, or read before it was written, gives wrong results here as
it would on a GPU, only every time. Memory that nobody holds any more is given back; work that still
uses it then fails, where a GPU would use what is another's by now. Behind every array lies a page
that nobody may touch: what reads or writes past an end dies there.
"""

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.kernels.cuda.program import Program
from tests.emulator.host_program import host_call


class EmulatedArray:
    """Memory of the device: the host sees its shape and cuts rows from it, and no more.

    Rows keep the array alive that they were cut from, its ``owner``. What ``is_adopted`` belongs to
    somebody else, who sees to it that it stays.
    """

    def __init__(
        self, held: np.ndarray, owner: "EmulatedArray | None" = None, is_adopted: bool = False
    ) -> None:
        self.held, self.owner, self.is_adopted = held, owner, is_adopted

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, rows: slice) -> "EmulatedArray":
        return EmulatedArray(self.held[rows], self.owner or self, self.is_adopted)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def dtype(self) -> np.dtype:
        return self.held.dtype

    def __array__(self, *_: object) -> np.ndarray:
        raise AssertionError("the host reads memory of the device")


class EmulatedDevice:
    """``room`` bytes of memory; ``seed`` draws the order in which queues take turns.

    ``product`` stands for the product of the device; by default float32 in NumPy's order.
    """

    def __init__(
        self,
        room: int = 2**33,
        seed: int = 0,
        product: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.name = "emulated device"
        self.random = np.random.default_rng(seed)
        self.room, self.used, self.peak = room, 0, 0
        self.queues: list[EmulatedQueue] = []
        self.products: list[tuple[int, ...]] = []
        self.launches: list[Program] = []
        self.uploaded_bytes = 0
        self._product = product or (lambda values, rows: values @ rows.T)

    def free_bytes(self) -> int:
        return self.room - self.used

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > self.free_bytes():
            raise OutOfDeviceMemory("The device has no room left.")
        array = guarded(size).view(dtype).reshape(shape)
        self.used += array.nbytes
        self.peak = max(self.peak, self.used)
        # memory as it is found: nobody may count on zeros
        array.reshape(-1).view(np.uint8)[...] = 0xA5
        made = EmulatedArray(array)
        weakref.finalize(made, self._give_back, array.nbytes).atexit = False
        return made

    def _give_back(self, size: int) -> None:
        self.used -= size

    def put(self, array: np.ndarray) -> EmulatedArray:
        made = self.empty(array.shape, array.dtype)
        made.held[...] = array
        return made

    def get(self, array: EmulatedArray) -> np.ndarray:
        return array.held.copy()

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def queue(self) -> "EmulatedQueue":
        self.queues.append(EmulatedQueue(self))
        return self.queues[-1]

    def product(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self.products.append((*values.shape, len(rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            return self._product(_numbers(values), _numbers(rows)).astype(np.float32)


def guarded(size: int) -> np.ndarray:
    """``size`` bytes that end, but for 15, where a page begins that cannot be read."""
    page, aligned = mmap.PAGESIZE, -(-size // 16) * 16
    whole = -(-aligned // page) * page
    held = np.frombuffer(mmap.mmap(-1, whole + page), np.uint8)
    behind = ctypes.c_void_p(held.ctypes.data + whole)
    if ctypes.CDLL(None, use_errno=True).mprotect(behind, ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return held[whole - aligned :][:size]


class EmulatedQueue:
    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.waiting: deque[Callable[[], None]] = deque()

    def _later(self, work: Callable[..., None], *given: Any) -> None:
        """Queues ``work(*given)``, with NumPy arrays in place of those of the device.

        What waits keeps no memory from being given back: whoever queued it must hold that.
        """
        arrays = [v for v in given if isinstance(v, EmulatedArray) and not v.is_adopted]
        holders = [weakref.ref(array.owner or array) for array in arrays]
        values = [v.held if isinstance(v, EmulatedArray) else v for v in given]

        def do() -> None:
            assert all(holder() is not None for holder in holders), "memory was given back"
            work(*values)

        self.waiting.append(do)

    def upload(self, to: EmulatedArray, values: np.ndarray) -> None:
        assert to.shape == values.shape and to.dtype == values.dtype
        self._device.uploaded_bytes += values.nbytes
        self._later(np.copyto, to, values)

    def download(self, to: np.ndarray, values: EmulatedArray) -> None:
        assert values.shape == to.shape and values.dtype == to.dtype
        self._later(np.copyto, to, values)

    def fill(self, array: EmulatedArray, byte: int) -> None:
        self._later(lambda held: held.reshape(-1).view(np.uint8).fill(byte), array)

    def adopt(self, tensor: Any) -> EmulatedArray:
        found = np.asarray(tensor) if isinstance(tensor, np.ndarray) else np.from_dlpack(tensor)
        return EmulatedArray(np.ascontiguousarray(found), is_adopted=True)

    def launch(self, program: Program, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        assert 0 < grid < 2**31 and 0 < block <= 1024, "CUDA refuses to launch this"
        self._device.launches.append(program)
        self._later(lambda *given: host_call(program, grid, block, given), *arguments)

    def product(self, out: EmulatedArray, values: EmulatedArray, rows: EmulatedArray) -> None:
        # cuBLAS is told sizes alone: whatever does not fit is read and written past its end
        assert out.shape == (len(values), len(rows)) and values.shape[1] == rows.shape[1]
        assert values.dtype == rows.dtype
        assert all(array.held.flags.c_contiguous for array in (out, values, rows))
        self._later(
            lambda to, *operands: np.copyto(to, self._device.product(*operands)), out, values, rows
        )

    def finish(self) -> None:
        """Does the work of this queue, and some of that of others in between."""
        while self.waiting:
            waiting = [queue for queue in self._device.queues if queue.waiting]
            waiting[self._device.random.integers(len(waiting))].waiting.popleft()()


def _numbers(array: np.ndarray) -> np.ndarray:
    """Operands of a product in float32: 16 bits are those of a bfloat16."""
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32)
