"""A pickle read as data: its opcodes are interpreted here, and no code of its choice is run.

The pickles that torch writes need about fifty opcodes (protocols 2 to 5). What would import, look
up attributes or fill objects is either given by the caller or refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moegeom.checkpoint.collection import no_collection
from moegeom.checkpoint.pickle.machine import Machine
from moegeom.core.limits import PICKLE_BYTES, PICKLE_STEPS

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
    act: Callable[[Machine, Any], None]
    cost: int
    steps: int = 1


def _reads(
    read: Argument, act: Callable[[Machine, Any], None], cost: int, steps: int = 2
) -> _Opcode:
    return _Opcode(read, None, act, cost, steps)


def _has(argument: Any, act: Callable[[Machine, Any], None], cost: int, steps: int = 1) -> _Opcode:
    return _Opcode(None, argument, act, cost, steps)


_NUMBER = 32
_TUPLE = 48
_PAIR = 64  # or a triple
_LONG = 64  # beside its bytes: it is the slowest opcode
_LIST = 96  # with room for four items
_DICT = 64
_STORAGE = 128

_TABLE: Mapping[str, _Opcode] = {
    "PROTO": _reads(_byte, Machine.ignore, 0),
    "FRAME": _reads(_number("<Q"), Machine.ignore, 0),
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
    "APPEND": _has(None, Machine.append, 0),
    "APPENDS": _has(None, Machine.append_marked, 0),
    "ADDITEMS": _has(None, Machine.append_marked, 0),
    "SETITEM": _has(None, Machine.set_item, 0, 3),
    "SETITEMS": _has(None, Machine.set_marked, 0),
    "MARK": _has(None, Machine.mark, 0),
    "POP": _has(None, Machine.pop, 0),
    "POP_MARK": _has(None, Machine.drop_marked, 0),
    "DUP": _has(None, Machine.duplicate, 0),
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
