"""A property that is computed once, by threads that do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - a decorator, as functools.cached_property
    """``functools.cached_property`` without its lock.

    Before Python 3.12 all objects of a class share that lock, so that headers of many shards would
    be fetched one after the other. Two threads that ask the same object at the same time may both
    compute the value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        # Python finds the value itself from now on: this class has no __set__.
        attribute = instance.__dict__[self.name] = self.compute(instance)
        return attribute
