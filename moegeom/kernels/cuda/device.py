"""What kernels and the engine ask of a device; :mod:`moegeom.kernels.cuda.cupy_device` gives it.

The arrays of a device have a shape and slices of rows; within a queue that is the current one they
are arrays like NumPy's, whose functions they answer to. Work is put into a queue and done in its
order, some time before the queue is finished; queues do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from moegeom.core.errors import MoeGeomError
from moegeom.kernels.cuda.program import Program

#: An array in the memory of a device.
DeviceArray = Any


class DeviceError(MoeGeomError):
    """A device is missing, or a call to it failed."""


class OutOfDeviceMemory(DeviceError):
    """An allocation did not fit."""


class Queue(Protocol):
    """Work in order; every call returns at once, except :meth:`finish`."""

    def current(self) -> AbstractContextManager[Any]:
        """While it lasts, what NumPy's functions do to arrays of the device goes into this queue.

        Arrays of the host are refused among them; what reads a number of the device waits.
        """
        ...

    def upload(self, to: DeviceArray, values: np.ndarray) -> None:
        """Copies from pinned memory of the host, which must stay as it is until ``finish``."""
        ...

    def fill(self, array: DeviceArray, byte: int) -> None:
        """Sets every byte of an array."""
        ...

    def launch(self, program: Program, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
        """Runs ``grid`` blocks of ``block`` threads; None stands for a null pointer."""
        ...

    def product(self, out: DeviceArray, values: DeviceArray, rows: DeviceArray) -> None:
        """``values @ rows.T`` with float32 accumulation, of bfloat16 or float32 operands.

        bfloat16 is kept as uint16; TF32 is not used. One shape always meets the same operations.
        """
        ...

    def adopt(self, tensor: Any) -> DeviceArray:
        """The memory of another library's tensor by DLPack, bfloat16 as uint16.

        Nothing is copied, unless the tensor is not C-ordered. The queue waits for what was put into
        the tensor before.
        """
        ...

    def finish(self) -> None:
        """Waits until all work is done.

        Raises
        ------
        DeviceError
            What a kernel or a copy in this queue ran into.
        """
        ...


class Device(Protocol):
    """One device of one host."""

    @property
    def name(self) -> str:
        """Its model, as ``NVIDIA H200``."""
        ...

    def free_bytes(self) -> int: ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Memory that is not initialised.

        Raises
        ------
        OutOfDeviceMemory
            When it does not fit.
        """
        ...

    def put(self, array: np.ndarray) -> DeviceArray:
        """A copy on the device, there when this returns."""
        ...

    def get(self, array: DeviceArray) -> np.ndarray:
        """A copy on the host, of work that is finished."""
        ...

    def has(self, tensor: Any) -> bool:
        """Whether an array of any library lies in its memory."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Memory of the host that the device can copy from and to by itself."""
        ...

    def compile(self, programs: Collection[Program]) -> None:
        """Begins to compile what will be launched, beside what else there is to do."""
        ...

    def queue(self) -> Queue: ...
