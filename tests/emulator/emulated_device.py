"""A device whose kernels run on the processor and whose queues do their work as late as they may.

Work is kept until somebody waits, and queues take turns in an order drawn at random. So a buffer
that is filled again before it was read, or read before it was written, gives wrong results here as
it would on a GPU, only every time. Memory that nobody holds any more is given back; work that still
uses it then fails, where a GPU would use what is another's by now. Behind every array lies a page
that nobody may touch: what reads or writes past an end dies there.
"""

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from moegeom.kernels.cuda.device import OutOfDeviceMemory
from moegeom.kernels.cuda.program import Program
from tests.emulator.host_program import host_call


class Memory:
    """What an array and all that is cut from it lie in; it ends with the last of them."""

    def __init__(self, device: "EmulatedDevice | None", is_adopted: bool = False) -> None:
        self.device, self.is_adopted = device, is_adopted


#: Functions of NumPy that CuPy has by the same name and that arrays of a device are given to.
FUNCTIONS = (
    "all any append arange argsort ascontiguousarray asarray clip concatenate cumsum diff empty "
    "empty_like flatnonzero full full_like max min nan_to_num nonzero ones_like prod ravel roll "
    "searchsorted sort stack sum take take_along_axis where zeros zeros_like"
).split()

#: Those of them that copy from the host.
COPYING = ("asarray",)


class EmulatedArray(np.ndarray):
    """Memory of the device.

    Its shape is known and rows can be cut from it at any time. Everything else is work of the queue
    that is the current one, is refused with arrays of the host, as by CuPy, and gives arrays of the
    device, single numbers among them. ``memory`` belongs to somebody else where it is adopted.
    """

    memory: Memory | None = None

    def __array_finalize__(self, of: object) -> None:
        self.memory = getattr(of, "memory", None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **given):
        with self._at_work(*inputs, *out):
            if out:
                given["out"] = tuple(map(plain, out))
            assert method in ("__call__", "reduce"), f"CuPy has no {ufunc.__name__}.{method}"
            result = getattr(ufunc, method)(*map(plain, inputs), **given)
        return out[0] if len(out) == 1 else self._made(result)

    def __array_function__(self, function, types, arguments, given):
        name = function.__name__
        assert name in FUNCTIONS, f"no array of a device is given to np.{name}"
        with self._at_work(*(() if name in COPYING else arguments), *given.values()):
            result = function(*plain(arguments), **{key: plain(v) for key, v in given.items()})
        return self._made(result)

    def __getitem__(self, place):
        if isinstance(place, slice) or not self.ndim:
            return super().__getitem__(place)
        with self._at_work(*(place if isinstance(place, tuple) else (place,))):
            return self._made(plain(self)[plain(place)])

    def __setitem__(self, place, values) -> None:
        with self._at_work(*(place if isinstance(place, tuple) else (place,)), values):
            plain(self)[plain(place)] = plain(values)

    def astype(self, dtype, **_):
        with self._at_work():
            return self._made(plain(self).astype(dtype))

    def copy(self, *_):
        with self._at_work():
            return self._made(plain(self).copy())

    def argsort(self, **given):
        with self._at_work():
            return self._made(plain(self).argsort(**given))

    def get(self) -> np.ndarray:
        with self._at_work():
            return plain(self).copy()

    def _number(self):
        with self._at_work():
            return plain(self).item()

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __repr__(self) -> str:
        return f"EmulatedArray({self.dtype}{list(self.shape)})"

    def tolist(self):
        raise AssertionError("the host reads memory of the device")

    @contextmanager
    def _at_work(self, *operands: object) -> Iterator[None]:
        """Work that is done now: behind what waits in the current queue, and in no other."""
        device = self.memory.device if self.memory else None
        queue = device.current if device else None
        assert queue is not None, "the host reads memory of the device"
        for one in _leaves(operands):
            is_foreign = isinstance(one, np.ndarray) and not isinstance(one, EmulatedArray)
            if is_foreign and one.ndim:
                raise TypeError("an array of the host beside one of the device")
        queue.finish()
        yield

    def _made(self, result):
        if isinstance(result, tuple):
            return tuple(map(self._made, result))
        array = np.asarray(result).view(EmulatedArray)
        # a pool gives it to nobody else before the queue has done what waits in it
        array.memory = Memory(self.memory.device, is_adopted=True)
        return array


def _leaves(values: object) -> Iterator[object]:
    if isinstance(values, tuple | list):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def plain(value):
    """Arrays as NumPy's own, in tuples and lists too."""
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    return type(value)(map(plain, value)) if isinstance(value, tuple | list) else value


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
        self.compiling: set[Program] = set()
        self.at_work, self._local = threading.RLock(), threading.local()
        self._product = product or (lambda values, rows: values @ rows.T)

    @property
    def current(self) -> "EmulatedQueue | None":
        """The queue that this thread works in."""
        return getattr(self._local, "queue", None)

    @current.setter
    def current(self, queue: "EmulatedQueue | None") -> None:
        self._local.queue = queue

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
        made = array.view(EmulatedArray)
        made.memory = Memory(self)
        weakref.finalize(made.memory, self._give_back, array.nbytes).atexit = False
        return made

    def _give_back(self, size: int) -> None:
        self.used -= size

    def put(self, array: np.ndarray) -> EmulatedArray:
        made = self.empty(array.shape, array.dtype)
        plain(made)[...] = array
        return made

    def get(self, array: EmulatedArray) -> np.ndarray:
        return plain(array).copy()

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, EmulatedTensor) and tensor.device is self

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def compile(self, programs: Collection[Program]) -> None:
        self.compiling.update(programs)

    def queue(self) -> "EmulatedQueue":
        self.queues.append(EmulatedQueue(self))
        return self.queues[-1]

    def product(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self.products.append((*values.shape, len(rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            return self._product(_numbers(values), _numbers(rows)).astype(np.float32)


class EmulatedTensor:
    """Somebody else's tensor in the memory of a device, as torch has it, or CuPy."""

    def __init__(self, array: np.ndarray, device: EmulatedDevice) -> None:
        self.array, self.device = array, device
        self.shape, self.nbytes, self.dtype = array.shape, array.nbytes, f"torch.{array.dtype}"
        self.is_bfloat16 = array.dtype == ml_dtypes.bfloat16

    def __getitem__(self, rows: Any) -> "EmulatedTensor":
        return EmulatedTensor(self.array[rows], self.device)

    def __iter__(self) -> Iterator["EmulatedTensor"]:
        return iter([self[number] for number in range(len(self.array))])

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(self) -> np.ndarray:
        return self.array


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
        held = [v.memory for v in given if isinstance(v, EmulatedArray)]
        holders = [weakref.ref(memory) for memory in held if not memory.is_adopted]
        del held
        values = [plain(value) for value in given]

        def do() -> None:
            assert all(holder() is not None for holder in holders), "memory was given back"
            work(*values)

        self.waiting.append(do)

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self._device.current = self._device.current, self
        try:
            yield
        finally:
            self._device.current = before

    def upload(self, to: EmulatedArray, values: np.ndarray) -> None:
        assert to.shape == values.shape and to.dtype == values.dtype
        self._device.uploaded_bytes += values.nbytes
        self._later(np.copyto, to, values)

    def fill(self, array: EmulatedArray, byte: int) -> None:
        self._later(lambda held: held.reshape(-1).view(np.uint8).fill(byte), array)

    def adopt(self, tensor: Any) -> EmulatedArray:
        if isinstance(tensor, EmulatedTensor):
            tensor = tensor.array.view(np.uint16) if tensor.is_bfloat16 else tensor.array
        found = np.asarray(tensor) if isinstance(tensor, np.ndarray) else np.from_dlpack(tensor)
        adopted = np.ascontiguousarray(found).view(EmulatedArray)
        adopted.memory = Memory(self._device, is_adopted=True)
        return adopted

    def launch(self, program: Program, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        assert 0 < grid < 2**31 and 0 < block <= 1024, "CUDA refuses to launch this"
        self._device.launches.append(program)
        self._later(lambda *given: host_call(program, grid, block, given), *arguments)

    def product(self, out: EmulatedArray, values: EmulatedArray, rows: EmulatedArray) -> None:
        # cuBLAS is told sizes alone: whatever does not fit is read and written past its end
        assert out.shape == (len(values), len(rows)) and values.shape[1] == rows.shape[1]
        assert values.dtype == rows.dtype
        assert all(array.flags.c_contiguous for array in (out, values, rows))
        self._later(
            lambda to, *operands: np.copyto(to, self._device.product(*operands)), out, values, rows
        )

    def finish(self) -> None:
        """Does the work of this queue, and some of that of others in between."""
        while True:
            with self._device.at_work:
                if not self.waiting:
                    return
                waiting = [queue for queue in self._device.queues if queue.waiting]
                waiting[self._device.random.integers(len(waiting))].waiting.popleft()()


def _numbers(array: np.ndarray) -> np.ndarray:
    """Operands of a product in float32: 16 bits are those of a bfloat16."""
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float32)
