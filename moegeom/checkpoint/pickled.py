"""A pickle read as data: its opcodes are interpreted here, and no code of its choice is run.

The pickles that torch writes need about fifty opcodes (protocols 2 to 5). What would import, look
up attributes or fill objects is either given by the caller or refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moegeom.checkpoint.pickle_machine import Machine

#: The metadata of a distributed checkpoint has 140 bytes for each piece of a tensor on a rank: 7 MB
#: for fifty thousand.
PICKLE_BYTES = 50_000_000


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
    at = 0
    try:
        while (code := raw[at]) != _STOP:
            if code not in _OPCODES:
                raise machine.refusal(_unknown(code, at))
            read, argument, act, cost = _OPCODES[code]
            behind = at + 1
            if read is not None:
                argument, behind = read(raw, behind)
            machine.left -= cost
            if machine.left < 0:
                machine.pay(0)
            act(machine, argument)
            at = behind
        return machine.stack.pop()
    except (IndexError, struct.error):
        raise machine.refusal(f"is malformed or breaks off at byte {at} of {len(raw)}") from None
    except UnicodeDecodeError:
        raise machine.refusal(f"holds a text that is not UTF-8 at byte {at}") from None


def _unknown(code: int, at: int) -> str:
    names = {ord(known.code): known.name for known in pickletools.opcodes}
    if code in names:
        return f"uses the opcode {names[code]} at byte {at}, which no checkpoint needs"
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

    A tuple, since a large checkpoint has millions of opcodes.
    """

    read: Argument | None
    argument: Any
    act: Callable[[Machine, Any], None]
    cost: int


def _reads(read: Argument, act: Callable[[Machine, Any], None], cost: int) -> _Opcode:
    return _Opcode(read, None, act, cost)


def _has(argument: Any, act: Callable[[Machine, Any], None], cost: int) -> _Opcode:
    return _Opcode(None, argument, act, cost)


_SLOT = 10  # on the stack or in the memo
_NUMBER = 45
_INTEGER = 300
_TUPLE = 60
_LIST = 120
_DICT = 100
_OBJECT = 400
_MADE = 250

_TABLE: Mapping[str, _Opcode] = {
    "PROTO": _reads(_byte, Machine.ignore, _SLOT),
    "FRAME": _reads(_number("<Q"), Machine.ignore, _SLOT),
    "NONE": _has(None, Machine.push, _SLOT),
    "NEWTRUE": _has(True, Machine.push, _SLOT),
    "NEWFALSE": _has(False, Machine.push, _SLOT),
    "BININT": _reads(_number("<i"), Machine.push, _NUMBER),
    "BININT1": _reads(_byte, Machine.push, _SLOT),
    "BININT2": _reads(_number("<H"), Machine.push, _NUMBER),
    "LONG1": _reads(_counted("<B"), Machine.push_integer, _INTEGER),
    "BINFLOAT": _reads(_number(">d"), Machine.push, _NUMBER),
    "BINUNICODE": _reads(_counted("<I"), Machine.push_text, _SLOT),
    "SHORT_BINUNICODE": _reads(_counted("<B"), Machine.push_text, _SLOT),
    "BINUNICODE8": _reads(_counted("<Q"), Machine.push_text, _SLOT),
    "BINBYTES": _reads(_counted("<I"), Machine.push_bytes, _SLOT),
    "SHORT_BINBYTES": _reads(_counted("<B"), Machine.push_bytes, _SLOT),
    "BINBYTES8": _reads(_counted("<Q"), Machine.push_bytes, _SLOT),
    "BYTEARRAY8": _reads(_counted("<Q"), Machine.push_bytes, _SLOT),
    "EMPTY_TUPLE": _has((), Machine.push, _SLOT),
    "TUPLE1": _has(1, Machine.push_tuple, _TUPLE),
    "TUPLE2": _has(2, Machine.push_tuple, _TUPLE),
    "TUPLE3": _has(3, Machine.push_tuple, _TUPLE),
    "TUPLE": _has(None, Machine.push_marked, _TUPLE),
    "FROZENSET": _has(None, Machine.push_marked, _TUPLE),
    "EMPTY_LIST": _has(list, Machine.push_new, _LIST),
    "EMPTY_SET": _has(list, Machine.push_new, _LIST),
    "EMPTY_DICT": _has(dict, Machine.push_new, _DICT),
    "APPEND": _has(None, Machine.append, _SLOT),
    "APPENDS": _has(None, Machine.append_marked, _SLOT),
    "ADDITEMS": _has(None, Machine.append_marked, _SLOT),
    "SETITEM": _has(None, Machine.set_item, _SLOT),
    "SETITEMS": _has(None, Machine.set_marked, _SLOT),
    "MARK": _has(None, Machine.mark, _LIST),
    "POP": _has(None, Machine.pop, _SLOT),
    "POP_MARK": _has(None, Machine.drop_marked, _SLOT),
    "DUP": _has(None, Machine.duplicate, _SLOT),
    "MEMOIZE": _has(None, Machine.memoize, _SLOT),
    "BINPUT": _reads(_byte, Machine.memoize, _SLOT),
    "LONG_BINPUT": _reads(_number("<I"), Machine.memoize, _SLOT),
    "BINGET": _reads(_byte, Machine.recall, _SLOT),
    "LONG_BINGET": _reads(_number("<I"), Machine.recall, _SLOT),
    "GLOBAL": _reads(_two_lines, Machine.find, _OBJECT),
    "STACK_GLOBAL": _has(None, Machine.find_stacked, _OBJECT),
    "REDUCE": _has(None, Machine.call, _MADE),
    "NEWOBJ": _has(None, Machine.call, _MADE),
    "BUILD": _has(None, Machine.build, _SLOT),
    "BINPERSID": _has(None, Machine.push_persistent, _OBJECT),
}

_CODES = {known.name: ord(known.code) for known in pickletools.opcodes}
_OPCODES = {_CODES[name]: row for name, row in _TABLE.items()}
_STOP = _CODES["STOP"]
