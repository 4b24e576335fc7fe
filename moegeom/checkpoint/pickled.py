"""A pickle read as data: its opcodes are interpreted here, and no code of its choice is run.

A pickle is a program for a machine with a stack, marks, and a memo of what was made. This one makes
plain values and records, and calls what its owner allows; it imports nothing, looks up nothing but
``__setstate__``, and hashes nothing but short texts and small numbers. The pickles of torch
need about fifty opcodes (protocols 2 to 5).
"""

from __future__ import annotations

import pickletools
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moegeom.checkpoint.reading import no_collection
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import (
    PICKLE_ARGUMENTS,
    PICKLE_BYTES,
    PICKLE_NAME_LENGTH,
    PICKLE_OBJECT_BYTES,
    PICKLE_STEPS,
)

# -------------------------------------------------------------------------------------- the machine
#: Bytes of an entry of the stack or the memo with the room to grow, and those of a mark.
_SLOT = 9
_MARK_BYTES = 41

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
        self.left: int = PICKLE_OBJECT_BYTES
        self.paid_slots: int = 0

    def refusal(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: the pickle {fault}.", _HINT)

    def pay(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise self.refusal(f"describes more than {PICKLE_OBJECT_BYTES} bytes of objects")

    def pay_for_slots(self) -> None:
        """Pay for what stack, memo and marks have grown to, beyond where they ever were."""
        slots = _SLOT * (len(self.stack) + len(self.memo)) + _MARK_BYTES * len(self.marks)
        if slots > self.paid_slots:
            self.pay(slots - self.paid_slots)
            self.paid_slots = slots

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

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        if start > len(self.stack):
            raise IndexError
        items = self.stack[start:]
        del self.stack[start:]
        if len(items) > _SHORT:
            self.pay(8 * len(items))
        return items

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

    def extend(self, items: list[Any]) -> None:
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
            printable = full if full.isprintable() and len(full) <= 200 else repr(full[:200])
            raise self.refusal(f"names {printable}, which is not among what a checkpoint holds")
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


# ------------------------------------------------------------------------------------------ opcodes
#: Opcodes between two looks at the steps, at what their objects take, and at the lengths of stack
#: and memo; each adds one entry at most.
_BATCH = 1000


def unpickle(
    raw: bytes,
    where: str,
    allowed: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The object that a pickle describes, built of plain values and of what ``allowed`` makes.

    Parameters
    ----------
    raw
        The pickle; bytes behind its end are ignored.
    where
        Its name in messages.
    allowed
        By ``"module.name"``, what stands in for a global. A callable is pushed as a ``Global``,
        and called with the arguments that the pickle gives, whatever they are; if its result has
        a ``__setstate__``, that receives the state. It must neither copy nor hash an argument:
        one large object may be passed a million times. Any other value is pushed as it is.
    persistent
        Gives the object for a persistent id.

    Returns
    -------
    object
        A set comes as a list, a frozenset as a tuple, a bytearray as bytes. The state of a dict
        (the attributes of an ``OrderedDict``) is dropped. A key is a str, a small int, None, an
        object that is hashed by identity, or an ``OddKey``.

    Raises
    ------
    CheckpointError
        If the pickle is malformed, too large, or needs anything else.
    """
    machine = Machine(where, allowed, persistent)
    if len(raw) > PICKLE_BYTES:
        raise machine.refusal(f"has {len(raw)} bytes, more than the {PICKLE_BYTES} allowed")
    at = steps = owed = 0
    stack, memo, marks = machine.stack, machine.memo, machine.marks
    push, remember = stack.append, memo.append
    build, call, set_marked = machine.build, machine.call, machine.set_marked
    try:
        with no_collection():
            while steps < PICKLE_STEPS:
                machine.pay_for_slots()
                machine.pay(owed)
                owed = 0
                steps += _BATCH
                for _ in range(_BATCH):
                    code = raw[at]
                    # A large checkpoint has ten million opcodes, and most are one of these.
                    if code == _MEMOIZE:
                        remember(stack[-1])
                        at += 1
                    elif code == _BINGET:
                        push(memo[raw[at + 1]])
                        at += 2
                    elif code == _LONG_BINGET:
                        push(memo[_FOUR_BYTES(raw, at + 1)[0]])
                        at += 5
                    elif code == _BININT1:
                        push(raw[at + 1])
                        at += 2
                    elif code == _EMPTY_TUPLE:
                        push(())
                        at += 1
                        if raw.startswith(_NEW_WITH_STATE, at):  # four of five in metadata
                            call(None)
                            remember(stack[-1])
                            owed += _DICT
                            push({})
                            remember(stack[-1])
                            marks.append(len(stack))
                            at += len(_NEW_WITH_STATE)
                            steps += 7
                    elif code == _MARK:
                        marks.append(len(stack))
                        at += 1
                    elif code == _BUILD:
                        build(None)
                        at += 1
                        steps += 1
                    elif code == _NEWOBJ:
                        call(None)
                        at += 1
                        steps += 1
                    elif code == _SETITEMS:
                        set_marked(None)
                        at += 1
                        steps += 1
                        if raw[at] == _BUILD:
                            build(None)
                            at += 1
                            steps += 2
                    elif code == _LONG_BINPUT and _FOUR_BYTES(raw, at + 1)[0] == len(memo):
                        remember(stack[-1])
                        at += 5
                    elif code == _STOP:
                        return stack.pop()
                    else:
                        row = _OPCODES[code]
                        if row is None:
                            raise machine.refusal(_unknown(code, at))
                        read, argument, act, cost, more = row
                        steps += more
                        behind = at + 1
                        if read is not None:
                            argument, behind = read(raw, behind)
                        owed += cost
                        act(machine, argument)
                        at = behind
        raise machine.refusal(f"takes more than {PICKLE_STEPS} steps")
    except (IndexError, struct.error):
        raise machine.refusal(f"is malformed or breaks off at byte {at} of {len(raw)}") from None
    except UnicodeDecodeError:
        raise machine.refusal(f"holds a text that is not UTF-8 at byte {at}") from None


def _unknown(code: int, at: int) -> str:
    if code in _NAMES:
        return f"uses the opcode {_NAMES[code]} at byte {at}, which no checkpoint needs"
    return f"is malformed: byte {at} is {code:#04x}, which is no opcode"


Argument = Callable[[bytes, int], tuple[Any, int]]


def _byte(raw: bytes, at: int) -> tuple[int, int]:
    return raw[at], at + 1


def _number(layout: str) -> Argument:
    read = struct.Struct(layout)
    return lambda raw, at: (read.unpack_from(raw, at)[0], at + read.size)


def _counted(layout: str) -> Argument:
    """Bytes behind their number."""
    number = _number(layout)

    def read(raw: bytes, at: int) -> tuple[bytes, int]:
        size, start = number(raw, at)
        if size > len(raw) - start:
            raise IndexError
        return raw[start : start + size], start + size

    return read


def _line(raw: bytes, at: int) -> tuple[str, int]:
    end = raw.find(b"\n", at)
    if end < 0:
        raise IndexError
    return str(raw[at:end], "utf-8"), end + 1


def _two_lines(raw: bytes, at: int) -> tuple[tuple[str, str], int]:
    module, at = _line(raw, at)
    name, at = _line(raw, at)
    return (module, name), at


class _Opcode(NamedTuple):
    """How to read its argument (None: it is ``argument``), what to do, and the memory that takes.

    ``steps`` are those it takes beyond the first.

    A tuple, since a large checkpoint has millions of opcodes.
    """

    read: Argument | None
    argument: Any
    act: Callable[[Machine, Any], object]
    cost: int
    steps: int = 1


def _reads(
    read: Argument, act: Callable[[Machine, Any], object], cost: int, steps: int = 2
) -> _Opcode:
    return _Opcode(read, None, act, cost, steps)


def _has(
    argument: Any, act: Callable[[Machine, Any], object], cost: int, steps: int = 1
) -> _Opcode:
    return _Opcode(None, argument, act, cost, steps)


_NUMBER = 32
_TUPLE = 48
_PAIR = 64  # or a triple
_LONG = 64  # beside its bytes: it is the slowest opcode
_LIST = 96  # with room for four items
_DICT = 64
_STORAGE = 128

_TABLE: Mapping[str, _Opcode] = {
    "PROTO": _reads(_byte, lambda machine, _: None, 0),
    "FRAME": _reads(_number("<Q"), lambda machine, _: None, 0),
    "NONE": _has(None, Machine.push, 0),
    "NEWTRUE": _has(True, Machine.push, 0),
    "NEWFALSE": _has(False, Machine.push, 0),
    "BININT": _reads(_number("<i"), Machine.push, _NUMBER),
    "BININT1": _reads(_byte, Machine.push, 0),
    "BININT2": _reads(_number("<H"), Machine.push, _NUMBER),
    "LONG1": _reads(_counted("<B"), Machine.push_integer, _LONG, 3),
    "BINFLOAT": _reads(_number(">d"), Machine.push, _NUMBER),
    "BINUNICODE": _reads(_counted("<I"), Machine.push_text, 0, 3),
    "SHORT_BINUNICODE": _reads(_counted("<B"), Machine.push_text, 0, 3),
    "BINUNICODE8": _reads(_counted("<Q"), Machine.push_text, 0, 3),
    "BINBYTES": _reads(_counted("<I"), Machine.push_bytes, 0),
    "SHORT_BINBYTES": _reads(_counted("<B"), Machine.push_bytes, 0),
    "BINBYTES8": _reads(_counted("<Q"), Machine.push_bytes, 0),
    "BYTEARRAY8": _reads(_counted("<Q"), Machine.push_bytes, 0),
    "EMPTY_TUPLE": _has((), Machine.push, 0),
    "TUPLE1": _has(1, Machine.push_tuple, _TUPLE, steps=2),  # which may hold one another
    "TUPLE2": _has(2, Machine.push_tuple, _PAIR),
    "TUPLE3": _has(3, Machine.push_tuple, _PAIR),
    "TUPLE": _has(None, Machine.push_marked, _TUPLE),
    "FROZENSET": _has(None, Machine.push_marked, _TUPLE),
    "EMPTY_LIST": _has(list, Machine.push_new, _LIST),
    "EMPTY_SET": _has(list, Machine.push_new, _LIST),
    "EMPTY_DICT": _has(dict, Machine.push_new, _DICT),
    "APPEND": _has(None, lambda machine, _: machine.extend([machine.stack.pop()]), 0),
    "APPENDS": _has(None, lambda machine, _: machine.extend(machine.since_mark()), 0),
    "ADDITEMS": _has(None, lambda machine, _: machine.extend(machine.since_mark()), 0),
    "SETITEM": _has(None, Machine.set_item, 0, 3),
    "SETITEMS": _has(None, Machine.set_marked, 0),
    "MARK": _has(None, lambda machine, _: machine.marks.append(len(machine.stack)), 0),
    "POP": _has(None, lambda machine, _: machine.stack.pop(), 0),
    "POP_MARK": _has(None, lambda machine, _: machine.since_mark(), 0),
    "DUP": _has(None, lambda machine, _: machine.push(machine.stack[-1]), 0),
    "MEMOIZE": _has(None, Machine.memoize, 0),
    "BINPUT": _reads(_byte, Machine.memoize, 0),
    "LONG_BINPUT": _reads(_number("<I"), Machine.memoize, 0),
    "BINGET": _reads(_byte, Machine.recall, 0),
    "LONG_BINGET": _reads(_number("<I"), Machine.recall, 0),
    "GLOBAL": _reads(_two_lines, Machine.find, 0, 4),
    "STACK_GLOBAL": _has(None, Machine.find_stacked, 0, 2),
    "REDUCE": _has(None, Machine.call, 0),
    "NEWOBJ": _has(None, Machine.call, 0),
    "BUILD": _has(None, Machine.build, 0),
    "BINPERSID": _has(None, Machine.push_persistent, _STORAGE, 3),
}

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_NAMES = {code: name for name, code in _CODES.items()}
_ROWS = {_CODES[name]: row for name, row in _TABLE.items()}
_OPCODES = [_ROWS.get(code) for code in range(256)]

_STOP = _CODES["STOP"]
_MEMOIZE = _CODES["MEMOIZE"]
_BINGET = _CODES["BINGET"]
_LONG_BINGET = _CODES["LONG_BINGET"]
_BININT1 = _CODES["BININT1"]
_EMPTY_TUPLE = _CODES["EMPTY_TUPLE"]
_MARK = _CODES["MARK"]
_BUILD = _CODES["BUILD"]
_NEWOBJ = _CODES["NEWOBJ"]
_SETITEMS = _CODES["SETITEMS"]
_LONG_BINPUT = _CODES["LONG_BINPUT"]
#: An object without arguments and the dict of its state, both remembered, up to what is in it.
_NEW_WITH_STATE = bytes([_NEWOBJ, _MEMOIZE, _CODES["EMPTY_DICT"], _MEMOIZE, _MARK])
_FOUR_BYTES = struct.Struct("<I").unpack_from
