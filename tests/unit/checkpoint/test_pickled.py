"""Oracle: the pickle module writes, and reads what is harmless; it also shows what is not."""

from __future__ import annotations

import argparse
import collections
import copyreg
import gc
import os
import pickle
import pickletools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.checkpoint import pickled
from moegeom.checkpoint.formats.pytorch import PickledTensor, Storage, UnreadableTensor
from moegeom.checkpoint.pickled import Global, OddKey, unpickle
from moegeom.core.errors import CheckpointError

#: How protocol 2, which has no bytes, spells them.
_BYTES = {"_codecs.encode": lambda text, coding: text.encode(coding), "__builtin__.bytes": bytes}

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
_KEYS = st.text() | st.integers(1 - 2**60, 2**60 - 1) | st.none()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=30,
)


def _refusal(raw: bytes, allowed: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        unpickle(raw, "f", allowed or {})
    assert caught.value.message.startswith("f: the pickle ")
    return caught.value.message.removeprefix("f: the pickle ")


@given(_VALUES, st.sampled_from((2, 3, 4, 5)))
def test_plain_values_are_what_was_pickled(value, protocol):
    read = unpickle(pickle.dumps(value, protocol), "f", _BYTES)
    assert repr(read) == repr(value)  # tells 0.0 from -0.0, and 1 from True


def test_long_objects_and_sets_are_read_and_one_object_in_two_places_stays_one():
    value = {
        "long": "é" * 70_000,
        "many": list(range(3000)),
        "keys": {str(i): i for i in range(3000)},
    }
    assert unpickle(pickle.dumps(value, 4), "f", {}) == value
    inner: list[Any] = [1]
    twice = unpickle(pickle.dumps([inner, inner]), "f", {})
    assert twice[0] is twice[1]
    inner.append(inner)
    endless = unpickle(pickle.dumps(inner), "f", {})
    assert endless[1] is endless
    allowed = {"builtins.bytearray": bytes, "collections.OrderedDict": dict}
    ordered = collections.OrderedDict(a=1, b=2)
    vars(ordered)["extra"] = "metadata"
    for protocol in (4, 5):
        raw = pickle.dumps([{1, 2}, frozenset("a"), bytearray(b"b"), ordered], protocol)
        *others, items = unpickle(raw, "f", allowed)
        assert others == [[1, 2], ("a",), b"b"]
        assert list(items.items()) == [("a", 1), ("b", 2)]


class _Namespace:
    """Stands in for argparse.Namespace."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_stand_in_receives_the_arguments_and_the_state(protocol):
    raw = pickle.dumps(argparse.Namespace(lr=0.1), protocol)
    found = unpickle(raw, "f", {"argparse.Namespace": _Namespace})
    assert (found.arguments, found.state) == ((), {"lr": 0.1})


def test_globals_are_names_and_persistent_ids_what_the_caller_makes_of_them():
    raw = pickle.dumps([os.getcwd, complex], 4)
    name, value = unpickle(raw, "f", {"posix.getcwd": print, "builtins.complex": "a value"})
    assert type(name) is Global
    assert (name.name, value) == ("posix.getcwd", "a value")
    raw = b"\x80\x02X\x01\x00\x00\x00aQ."
    assert unpickle(raw, "f", {}, lambda text: text * 3) == "aaa"
    assert _refusal(raw) == "refers to an object that lies outside of it."


class _Touching:
    """Leaves a file behind when it is made, or when it is given a state."""

    def __new__(cls, path: str = "", *, name: str = "") -> _Touching:
        if path or name:
            Path(path or name).touch()
        return super().__new__(cls)

    def __init__(self, *_: str) -> None: ...

    def __setstate__(self, path: str) -> None:
        Path(path).touch()


_NAME = f"{__name__}\n_Touching\n".encode()


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


_ATTACKS: dict[str, Callable[[str], bytes]] = {
    "REDUCE": lambda path: b"c" + _NAME + _text(path) + b"\x85R.",
    "REDUCE of os": lambda path: b"cos\nmkdir\n" + _text(path) + b"\x85R.",
    "STACK_GLOBAL": lambda path: (
        b"\x80\x04" + _text(__name__) + _text("_Touching") + b"\x93" + _text(path) + b"\x85R."
    ),
    "BUILD": lambda path: b"\x80\x02c" + _NAME + b")\x81" + _text(path) + b"b.",
    "NEWOBJ": lambda path: b"\x80\x02c" + _NAME + _text(path) + b"\x85\x81.",
    "NEWOBJ_EX": lambda path: (
        b"\x80\x04c" + _NAME + b")}" + _text("name") + _text(path) + b"s\x92."
    ),
    "INST": lambda path: b"(" + _text(path) + b"i" + _NAME + b".",
    "OBJ": lambda path: b"(c" + _NAME + _text(path) + b"o.",
    "EXT1": lambda path: b"\x80\x02\x82\xf1" + _text(path) + b"\x85R.",
}


@pytest.fixture
def _extension() -> Iterator[None]:
    copyreg.add_extension(__name__, "_Touching", 0xF1)
    yield
    copyreg.remove_extension(__name__, "_Touching", 0xF1)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("opcode", _ATTACKS)
def test_what_pickle_would_run_is_not_run(opcode, tmp_path):
    canary = tmp_path / "canary"
    raw = _ATTACKS[opcode](str(canary))
    _refusal(raw)
    _refusal(raw, {"collections.OrderedDict": dict, "torch.Size": tuple})
    assert not canary.exists()
    pickle.loads(raw)
    assert canary.exists()


_SUPPORTED = {chr(code) for code in pickled._ROWS} | {"."}
_REFUSED = {op.name: op.code for op in pickletools.opcodes if op.code not in _SUPPORTED}


def test_foreign_globals_and_opcodes_that_checkpoints_do_not_need_are_named():
    for name, code in _REFUSED.items():
        raw = b"\x80\x04(]" + code.encode("latin-1") + b"\x00" * 20
        assert _refusal(raw) == f"uses the opcode {name} at byte 4, which no checkpoint needs."
    # those that run code in odd ways
    assert {"INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"} <= _REFUSED.keys()
    sentence = "names posix.system, which is not among what a checkpoint holds."
    assert _refusal(pickle.dumps(os.system)) == sentence
    assert _refusal(b"c\x1b[2J\nx\n.").startswith("names '\\x1b[2J.x', which")


_NONSENSE = {
    "a call of a text": (b"X\x01\0\0\0a)R.", "calls a str with a tuple"),
    "a call of a result": (b"cmake\nlist\n)R)R.", "calls a list with a tuple"),
    "a call with a list": (b"cmake\nlist\n]R.", "calls make.list with a list"),
    "a call with an argument too many": (b"cmake\nnone\nN\x85R.", "that it does not take"),
    "a call with 256 arguments": (
        b"cmake\nlist\n(" + b"N" * 256 + b"tR.", "calls make.list with 256 arguments",
    ),
    "the state of a list": (b"]Nb.", "sets the state of a list"),
    "the state of a name": (b"cmake\nlist\nNb.", "sets the state of make.list"),
    "a state that is refused": (b"cmake\nstate\n)RNb.", "gives a State a state that it cannot have"),
    "an append to a dict": (b"}Na.", "appends to a dict"),
    "an item of a list": (b"]NNs.", "gives 2 keys and values to a list"),
    "a key without a value": (b"}(Nu.", "gives 1 keys and values to a dict"),
    "a key of 5000 characters": (
        b"}X\x88\x13\0\0" + b"k" * 5000 + b"Ns.", "has a key of 5000 characters",
    ),
    "a name of 5000 characters": (b"c" + b"m" * 5000 + b"\nx\n.", "names a global of 5001 characters"),
    "a name that is a number": (b"NN\x93.", "names a global by a NoneType and a NoneType"),
    "a gap in the memo": (b"Nq\x07.", "remembers object 7 after 0 others"),
    "an empty memo": (b"h\x00.", "is malformed or breaks off at byte 0 of 3"),
    "an empty stack": (b"0.", "is malformed or breaks off at byte 0 of 2"),
    "nothing to return": (b".", "is malformed or breaks off at byte 0 of 1"),
    "a tuple of too few": (b"N\x86.", "is malformed or breaks off at byte 1 of 3"),
    "no mark": (b"Nt.", "is malformed or breaks off at byte 1 of 3"),
    "no bytes": (b"", "is malformed or breaks off at byte 0 of 0"),
    "a text beyond the end": (b"X\xff\xff\xff\x7fa.", "is malformed or breaks off at byte 0 of 7"),
    "a text that is not UTF-8": (b"X\x01\0\0\0\xff.", "holds a text that is not UTF-8 at byte 0"),
    "no opcode": (b"N\xff.", "is malformed: byte 1 is 0xff, which is no opcode"),
}  # fmt: skip


class _State:
    def __setstate__(self, state: Any) -> None:
        raise ValueError


_MAKE = {"make.list": lambda *_: [], "make.none": lambda: None, "make.state": _State}


@pytest.mark.parametrize("case", _NONSENSE)
def test_nonsense_is_refused_in_a_sentence(case):
    raw, sentence = _NONSENSE[case]
    assert sentence in _refusal(raw, _MAKE)


def test_a_pickle_that_breaks_off_is_refused_and_bytes_behind_its_end_are_ignored():
    raw = pickle.dumps({"a": [1, 2.5, "text", (None, True)], "b": 2**70})
    for length in range(len(raw)):
        _refusal(raw[:length])
    assert unpickle(b"N.\xff\xff", "f", {}) is None


def test_keys_that_are_hashed_by_value_are_wrapped_and_others_are_not():
    raw = pickle.dumps({(1, 2): "a", 2.5: "b", b"c": "c", 2**61: "d", 7: "e", None: "f"})
    keys = list(unpickle(raw, "f", {}))
    assert [k.value for k in keys if isinstance(k, OddKey)] == [(1, 2), 2.5, b"c", 2**61]
    assert [k for k in keys if not isinstance(k, OddKey)] == [7, None]
    raw = pickle.dumps({argparse.Namespace: 1})
    (key,) = unpickle(raw, "f", {"argparse.Namespace": _Namespace})
    assert type(key) is Global


_BOMBS = {
    "lists": b"]", "dicts": b"}", "marks": b"(", "numbers": b"J\0\1\2\3", "floats": b"G" + b"\1" * 8,
    "tuples": b"N\x85", "texts": b"X\x04\0\0\0\xf0\x9f\x90\xa6", "copies": b"N2", "memo": b"N\x94",
    "dicts of one": b"}NNs", "lists of one": b"]Na", "large integers": b"\x8a\xff" + b"\x7f" * 255,
    "calls": b"cmake\nlist\n)R", "bytes": b"B\x03\0\0\0abc", "names": b"cmake\nlist\n",
    "a long dict": b"}(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(3000)) + b"u",
    "pairs": b"NN\x86", "triples": b"NNN\x87", "small integers": b"\x8a\x03\x7f\x7f\x7f",
    "two bytes": b"M\xff\xff", "a dict of odd keys": b"}(" + b"]N" * 3000 + b"u",
    "a dict of six": b"}" + b"".join(b"K" + bytes([i]) + b"Ns" for i in range(6)),
    "a list of five": b"]" + b"Na" * 5,
    "a long list": b"](" + b"N" * 3000 + b"e", "a long tuple": b"(" + b"N" * 3000 + b"t",
}  # fmt: skip


@pytest.mark.parametrize("case", _BOMBS)
def test_no_pickle_takes_more_memory_than_is_allowed(case, monkeypatch):
    budget = 100_000
    monkeypatch.setattr(pickled, "PICKLE_OBJECT_BYTES", budget)
    monkeypatch.setattr(pickled, "_BATCH", 50)  # what one takes is paid for behind it
    raw = _BOMBS[case] * (2 * budget // len(_BOMBS[case]))
    tracemalloc.start()
    message = _refusal(raw, _MAKE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message == f"describes more than {budget} bytes of objects."
    assert peak < 1.2 * budget


@pytest.mark.parametrize(("opcodes", "steps"), [(b"((", 2), (b"N0", 4), (b"cmake\nlist\n", 5)])
def test_a_pickle_of_too_many_steps_is_refused(opcodes, steps, monkeypatch):
    monkeypatch.setattr(pickled, "PICKLE_STEPS", 12_000)
    monkeypatch.setattr(pickled, "_BATCH", 1)
    most = 12_000 // steps
    unpickle(opcodes * (most - 2) + b"N.", "f", _MAKE)
    assert _refusal(opcodes * (most + 1) + b"N.", _MAKE) == "takes more than 12000 steps."


def test_a_long_name_is_kept_once_and_a_pickle_above_the_limit_is_not_read(monkeypatch):
    names = _text("m" * 2000) + b"\x94" + _text("n" * 2000) + b"\x94"
    raw = b"\x80\x04](" + names + b"h\x00h\x01\x93" * 3000 + b"e."
    tracemalloc.start()
    found = unpickle(raw, "f", {f"{'m' * 2000}.{'n' * 2000}": _Namespace})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(map(id, found[2:]))) == 1
    assert peak < 500_000
    monkeypatch.setattr(pickled, "PICKLE_BYTES", 10)
    assert _refusal(b"N." + bytes(9)) == "has 11 bytes, more than the 10 allowed."


@pytest.mark.parametrize("record", [Global, OddKey, PickledTensor, UnreadableTensor, Storage])
def test_no_pickle_can_change_a_record(record):
    # a dataclass with slots=True would let it: it has a __setstate__
    assert not hasattr(record, "__setstate__")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_search_for_garbage_is_as_before(was_enabled):
    enabled = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        unpickle(b"N.", "f", {})
        _refusal(b"\xff")
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if enabled else gc.disable)()
