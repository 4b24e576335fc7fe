"""A property that is made once, also where several threads ask for it at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

#: Where an object keeps its lock.
_LOCK = "_lock of once"


class once(Generic[T]):  # noqa: N801 - written as a decorator
    """A property of an object that threads share: the first makes it, the others wait for it.

    ``functools.cached_property`` has one lock for all objects in Python 3.11, and none after it.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, owner: None, of: type) -> once[T]: ...

    @overload
    def __get__(self, owner: object, of: type) -> T: ...

    def __get__(self, owner: object | None, of: type) -> Any:
        if owner is None:
            return self
        held = vars(owner)
        with held.setdefault(_LOCK, threading.RLock()):
            if self._name not in held:
                held[self._name] = self._make(owner)
        return held[self._name]
