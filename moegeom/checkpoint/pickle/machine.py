"""The machine that a pickle is a program for: a stack, marks, and a memo of what was made.

It makes plain values and records, and calls what its owner allows; it imports nothing, looks up
nothing but ``__setstate__``, and hashes nothing but short texts and small numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moegeom.core.errors import CheckpointError
from moegeom.core.limits import PICKLE_ARGUMENTS, PICKLE_NAME_LENGTH, PICKLE_OBJECT_BYTES

#: Bytes of an entry of the stack or the memo with the room to grow, and those of a mark.
_SLOT = 9
_MARK = 41

#: Integers from here on share their hash with smaller ones.
_LARGE_KEY = 2**60

#: Entries that a dict has room for from its first on, the bytes of that room, and those of each
#: entry of a larger dict while it grows.
_FEW = 5
_ROOM = 176
_ENTRY = 120

#: Bytes of an item of a list, with the room to grow.
_ITEM = 10

#: Items that are taken off the stack without being paid for, since they are copied once at a time.
_SHORT = 1000

#: What the allocator adds to the size that Python gives, and the size of an ``OddKey``.
_ROUNDED = 16
_ODD_KEY = 48

#: A ``Global`` and its place in the table of those that were found.
_FOUND = 400

#: The largest record: what a call makes.
_MADE = 112

#: What a stand-in raises when it is given anything but what it expects.
_WRONG_VALUES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

_HINT = "Only tensors and plain values are read; write the file anew with nothing else in it."


@dataclass(frozen=True, eq=False)
class Global:
    """A function or a class that a pickle names, and what stands in for it here."""

    name: str
    stand_in: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class OddKey:
    """A dict key that is no text and no integer; two of them are never equal.

    Hashing a value takes as long as the value is large, and a file can give many values one hash.
    """

    __slots__ = ("value",)

    value: Any


class Record:
    """What stands in for an object: it keeps the state that the pickle gives it, no more."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = None


class Machine:
    """The stack, the memo and what is left of memory and time; most methods are one opcode each.

    ``stack``, ``marks`` and ``memo`` stay the same lists: the interpreter holds on to them.
    """

    def __init__(
        self, where: str, allowed: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.where = where
        self.allowed = allowed
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.found: dict[tuple[str, str], Any] = {}
        self.left = PICKLE_OBJECT_BYTES
        self.paid_slots = 0

    def refusal(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: the pickle {fault}.", _HINT)

    def pay(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise self.refusal(f"describes more than {PICKLE_OBJECT_BYTES} bytes of objects")

    def pay_for_slots(self) -> None:
        """Pay for what stack, memo and marks have grown to, beyond where they ever were."""
        slots = _SLOT * (len(self.stack) + len(self.memo)) + _MARK * len(self.marks)
        if slots > self.paid_slots:
            self.pay(slots - self.paid_slots)
            self.paid_slots = slots

    def ignore(self, _: Any) -> None: ...

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, make: Callable[[], Any]) -> None:
        self.stack.append(make())

    def push_bytes(self, value: bytes) -> None:
        self.pay(sys.getsizeof(value) + _ROUNDED)
        self.stack.append(value)

    def push_text(self, raw: bytes) -> None:
        text = str(raw, "utf-8", "surrogatepass")
        self.pay(sys.getsizeof(text) + _ROUNDED)
        self.stack.append(text)

    def push_integer(self, raw: bytes) -> None:
        value = int.from_bytes(raw, "little", signed=True)
        self.pay(sys.getsizeof(value) + _ROUNDED)
        self.stack.append(value)

    def pop(self, _: Any) -> None:
        self.stack.pop()

    def duplicate(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise IndexError
        items = self.stack[start:]
        del self.stack[start:]
        if len(items) > _SHORT:
            self.pay(8 * len(items))
        return items

    def drop_marked(self, _: Any) -> None:
        self.since_mark()

    def push_tuple(self, length: int) -> None:
        stack = self.stack
        items = tuple(stack[-length:])
        if len(items) < length:
            raise IndexError
        stack[-length:] = (items,)

    def push_marked(self, _: Any) -> None:
        items = tuple(self.since_mark())
        self.pay(8 * len(items))
        self.stack.append(items)

    def memoize(self, index: int | None) -> None:
        """Every pickler numbers what it remembers without gaps, and a list stays small."""
        if index is None or index == len(self.memo):
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise self.refusal(f"remembers object {index} after {len(self.memo)} others")

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def append_marked(self, _: Any) -> None:
        self._extend(self.since_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise self.refusal(f"appends to {_kind(target)}")
        self.pay(_ITEM * len(items))
        target.extend(items)

    def set_item(self, _: Any) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def set_marked(self, _: Any) -> None:
        self._set_items(self.since_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise self.refusal(f"gives {len(items)} keys and values to {_kind(target)}")
        num = len(items) // 2
        is_small = len(target) + num <= _FEW
        self.pay((0 if target else _ROOM) + (0 if is_small else _ENTRY * num))
        pairs = iter(items)
        for key, value in zip(pairs, pairs, strict=True):
            if type(key) is not str or len(key) > PICKLE_NAME_LENGTH:
                key = self._key(key)
            target[key] = value

    def _key(self, key: Any) -> Any:
        """What stands for a key that is no short text."""
        if type(key) is str:
            raise self.refusal(f"has a key of {len(key)} characters")
        is_small = isinstance(key, int) and -_LARGE_KEY < key < _LARGE_KEY
        if is_small or key is None or type(key).__hash__ is object.__hash__:
            return key
        self.pay(_ODD_KEY)
        return OddKey(key)

    def find(self, names: tuple[Any, Any]) -> None:
        module, name = names
        if type(module) is not str or type(name) is not str:
            raise self.refusal(f"names a global by {_kind(module)} and {_kind(name)}")
        # One object for each name: the memo may repeat a long one a million times.
        if (module, name) not in self.found:
            self.found[module, name] = self._look_up(module, name)
        self.stack.append(self.found[module, name])

    def _look_up(self, module: str, name: str) -> Any:
        if len(module) + len(name) > PICKLE_NAME_LENGTH:
            raise self.refusal(f"names a global of {len(module) + len(name)} characters")
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise self.refusal(
                f"names {_printable(full)}, which is not among what a checkpoint holds"
            )
        self.pay(_FOUND + sys.getsizeof(full))
        target = self.allowed[full]
        return Global(full, target) if callable(target) else target

    def find_stacked(self, _: Any) -> None:
        name = self.stack.pop()
        self.find((self.stack.pop(), name))

    def call(self, _: Any) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if type(function) is not Global or type(arguments) is not tuple:
            raise self.refusal(f"calls {_kind(function)} with {_kind(arguments)}")
        if len(arguments) > PICKLE_ARGUMENTS:
            raise self.refusal(f"calls {function.name} with {len(arguments)} arguments")
        self.pay(_MADE + len(arguments))
        try:
            made = function.stand_in(*arguments)
        except _WRONG_VALUES:
            raise self.refusal(
                f"calls {function.name} with {len(arguments)} arguments that it does not take"
            ) from None
        self.stack.append(made)

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
            return
        if type(target) is dict:
            return
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is None:
            raise self.refusal(f"sets the state of {_kind(target)}")
        try:
            set_state(target, state)
        except _WRONG_VALUES:
            raise self.refusal(f"gives {_kind(target)} a state that it cannot have") from None

    def push_persistent(self, _: Any) -> None:
        if self.persistent is None:
            raise self.refusal("refers to an object that lies outside of it")
        try:
            self.stack.append(self.persistent(self.stack.pop()))
        except _WRONG_VALUES:
            raise self.refusal("refers to an object outside of it that cannot exist") from None


def _kind(value: Any) -> str:
    return value.name if type(value) is Global else f"a {type(value).__name__.lstrip('_')}"


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 200 else repr(name[:200])
