"""A device whose kernels run on the processor and whose queues do their work as late as they may.

Work is kept until somebody waits, and queues take turns in an order drawn at random. So a buffer
that is filled again before it was read, or read before it was written, gives wrong results here as
it would on a GPU, only every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.kernels.cuda.program import Program
from tests.emulator.host_program import host_call


class EmulatedArray:
    """Memory of the device: the host sees its shape and cuts rows from it, and no more."""

    def __init__(self, held: np.ndarray) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, rows: slice) -> EmulatedArray:
        return EmulatedArray(self.held[rows])

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
        self.room, self.used = room, 0
        self.queues: list[EmulatedQueue] = []
        self.products: list[tuple[int, ...]] = []
        self.launches: list[Program] = []
        self.uploaded_bytes = 0
        self._product = product or (lambda values, rows: values @ rows.T)

    def free_bytes(self) -> int:
        return self.room - self.used

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> EmulatedArray:
        array = np.empty(shape, dtype)
        if array.nbytes > self.free_bytes():
            raise OutOfDeviceMemory("The device has no room left.")
        self.used += array.nbytes
        # memory as it is found: nobody may count on zeros
        array.reshape(-1).view(np.uint8)[...] = 0xA5
        return EmulatedArray(array)

    def put(self, array: np.ndarray) -> EmulatedArray:
        made = self.empty(array.shape, array.dtype)
        made.held[...] = array
        return made

    def get(self, array: EmulatedArray) -> np.ndarray:
        return array.held.copy()

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def queue(self) -> EmulatedQueue:
        self.queues.append(EmulatedQueue(self))
        return self.queues[-1]

    def product(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self.products.append((*values.shape, len(rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            return self._product(_numbers(values), _numbers(rows)).astype(np.float32)


class EmulatedQueue:
    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.waiting: deque[Callable[[], None]] = deque()

    def upload(self, to: EmulatedArray, values: np.ndarray) -> None:
        assert to.shape == values.shape and to.dtype == values.dtype
        self._device.uploaded_bytes += values.nbytes
        self.waiting.append(lambda: np.copyto(to.held, values))

    def download(self, to: np.ndarray, values: EmulatedArray) -> None:
        assert values.shape == to.shape and values.dtype == to.dtype
        self.waiting.append(lambda: np.copyto(to, values.held))

    def fill(self, array: EmulatedArray, byte: int) -> None:
        self.waiting.append(lambda: array.held.reshape(-1).view(np.uint8).fill(byte))

    def adopt(self, tensor: Any) -> EmulatedArray:
        found = np.asarray(tensor) if isinstance(tensor, np.ndarray) else np.from_dlpack(tensor)
        return EmulatedArray(found)

    def launch(self, program: Program, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        given = tuple(v.held if isinstance(v, EmulatedArray) else v for v in arguments)
        self._device.launches.append(program)
        self.waiting.append(lambda: host_call(program, grid, block, given))

    def product(self, out: EmulatedArray, values: EmulatedArray, rows: EmulatedArray) -> None:
        self.waiting.append(
            lambda: np.copyto(out.held, self._device.product(values.held, rows.held))
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
