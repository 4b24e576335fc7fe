"""Damage to a file that knows how the file is built: each language has edits of its own.

Half of the edits keep the file readable by its parser (a JSON value becomes another, an opcode is
doubled, a column changes its type), so that what lies behind the parser is reached; the others are
bytes. The same random numbers give the same damage.
"""

import contextlib
import io
import json
import lzma
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

Edit = Callable[[bytes, random.Random], bytes]

_SIZES = [
    0, 1, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**60, 2**63 - 1, 2**64 - 1,
]  # fmt: skip

_WORDS = [
    b"", b"\0", b"\xff", b"\0" * 8, b"\xff" * 8, b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\n",
    b"-1", b"NaN", b"null", b"true", b"1e999", b"9" * 30, b"9" * 5000, b"[" * 3000, b'{"a":' * 900, b"../x",
    b"\\ud800", b"\x1b[31m", "é𝛼\u202e".encode(), b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\7", b"GGUF",
    b"PAR1", b"\x93NUMPY", b"k05VTVBZ", b"...", b"a" * 5000,
]  # fmt: skip

_OPCODES = [
    b"(", b"]", b"}", b")", b".", b"0", b"1", b"2", b"N", b"R", b"b", b"s", b"u", b"t", b"a", b"e", b"\x81",
    b"\x85", b"\x86", b"\x87", b"\x88", b"\x93", b"\x94", b"Q", b"q\0", b"h\0", b"h\1", b"h\xff", b"K\xff",
    b"M\xff\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"\x8a\xff" + b"\x7f" * 255, b"X\xff\xff\xff\x7f", b"X\x01\0\0\0a", b"G\x7f\xf0" + bytes(6),
    b"G\x7f\xf8" + bytes(6), b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8,
    b"cos\nsystem\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"(" * 500,
    b"]" * 500, b")" + b"\x85" * 3000, b")" + b"2\x86" * 64, b"h\0h\0s" * 500, b"B\x03\0\0\0abc", b"cc\nd\n",
]  # fmt: skip

#: JSON as it is written; what Python's writer would not write among it.
_VALUES = [
    "null", "true", "false", "0", "-1", "1", "2", "3", "7", "1e308", "-0.0", "0.5", "1e999", "-1e999", "NaN",
    "Infinity", "5e-324", str(2**31), str(2**53 + 1), str(2**63), str(-(2**63)), str(2**64), str(10**30),
    "9" * 400, "9" * 4200, "9" * 5000, "[" * 990 + "]" * 990, "[" * 5000 + "]" * 5000,
    '{"a":' * 800 + "1" + "}" * 800, '""', '"x"', '"/"', '"../../etc/passwd"', '"\\ud800"', '"\\u001b[31m"',
    '"\\u0000"', '"' + "x" * 5000 + '"', '"1"', '"nan"', '"text/0"', "[]", "{}", "[null]", "[[]]", "[{}]",
    "[1, 2]", "[-1]", "[0.5]", '["a"]', "[[[1]]]", '{"": null}', '{"a": {"b": []}}', "[" + "0," * 300 + "0]",
    f"[{2**39}, {2**39}, 2]",
]  # fmt: skip

_TOML = [
    "true", "-1", "0", "0.5", "nan", "-inf", "1e400", "9" * 5000, "9" * 400, str(2**63), '""', '"x"', "'''", "[]",
    "[[]]", "{}", "[1, 2]", '["a"]', "1979-05-27", "07:32:00", "{a = 1}", "[" * 500 + "]" * 500, '"\\u001b[31m"',
    '"' + "x" * 5000 + '"', '"../x"', '"{layer}"', '"{layer}.{0.__class__}"', '"MGI110"', '"(((((a*)*)*)*)*b"',
]  # fmt: skip

_NPY = [
    "'|O'", "'<f8'", "'>i4'", "'<U9'", "'<M8[s]'", "'V0'", "[('a', '<i4')]", "'|S0'", "'f4,f4'", "(-1, 4)",
    "(0,)", "()", "(99999999999, 4, 4)", f"({2**62}, {2**62}, 0)", "(4, 4, 4, 4, 4, 4)", "(1.5,)", "True", "None",
    "9" * 5000, "'" + "x" * 70 + "'", "(" * 300 + ")" * 300, "-" * 3000 + "1", "lambda: 0", "1j", "b''",
]  # fmt: skip


#: What parsers raise for a file that an earlier edit has spoilt.
UNREADABLE = (
    ValueError, KeyError, IndexError, EOFError, OSError, RuntimeError, struct.error, zlib.error,
    lzma.LZMAError, zipfile.BadZipFile, OverflowError,
)  # fmt: skip


def mutated(raw: bytes, language: str, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2))):
        edit = edit_bytes if draw.random() < 0.25 else LANGUAGES.get(language, edit_bytes)
        try:
            raw = edit(raw, draw)
        except UNREADABLE:
            raw = edit_bytes(raw, draw)  # an earlier edit left nothing for a parser
    return raw


def edit_bytes(raw: bytes, draw: random.Random) -> bytes:
    """A flip, a cut, a splice from elsewhere in the file, a doubled span, a word, a length."""
    data = bytearray(raw)
    at = draw.randrange(len(data) + 1)
    if draw.random() < 0.3:  # most of what can be said wrongly stands at the ends
        at = min(at, draw.randrange(64)) if draw.random() < 0.5 else max(at, len(data) - 64)
    span = draw.choice((0, 1, 1, 2, 4, 8, 40, 400))
    kind = draw.randrange(8)
    if kind == 0 and data:
        data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[at : at + span]
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        start = draw.randrange(len(data) + 1)
        data[at : at + span] = data[start : start + draw.choice((1, 8, 64))]
    elif kind == 4:
        data[at:at] = data[at : at + span]
    elif kind == 5:
        data[at : at + span] = draw.choice(_WORDS)
    elif kind == 6:
        size = draw.choice(_SIZES) + draw.choice((0, 0, -1, 1))
        width = draw.choice((1, 2, 4, 8))
        at &= -width if draw.random() < 0.5 else -1
        data[at : at + width] = (size % 256**width).to_bytes(width, draw.choice(("little", "big")))
    else:
        data[at : at + span] = draw.randbytes(span)
    return bytes(data)


# ------------------------------------------------------------------------------------------- JSON
_MARK = "\ue000"
_MARKED = re.compile(f'"{_MARK}([0-9]+)"')


@lru_cache(64)
def _json_text(raw: bytes) -> str:
    json.loads(raw)
    return raw.decode()


def edit_json(raw: bytes, draw: random.Random) -> bytes:
    """One value at any depth becomes another, goes, is wrapped, or stands twice."""
    document = {"": json.loads(_json_text(raw))}
    holder, key = _place(document, draw)
    kind = draw.randrange(10)
    if kind == 0 and holder is not document:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict) and holder is not document:
        holder[f"{key}{_MARK}"] = f"{_MARK}{draw.randrange(len(_VALUES))}"
    elif kind == 2:
        holder[key] = draw.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 3))
    elif kind == 3:
        other, name = _place(document, draw)
        holder[key] = json.loads(json.dumps(other[name]))
    elif kind == 4 and isinstance(holder, dict) and holder is not document:
        holder[draw.choice(("", "x", "a" * 3000, "\x1b[31m", f"{key}.", str(key).upper()))] = (
            holder.pop(key)
        )
    elif kind == 5 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = draw.choice((-holder[key], holder[key] + 1, holder[key] * 2, holder[key] - 1))
    else:
        holder[key] = f"{_MARK}{draw.randrange(len(_VALUES))}"
    text = json.dumps(document[""], ensure_ascii=False)
    return (
        _MARKED.sub(lambda found: _VALUES[int(found[1])], text)
        .replace(_MARK, "")
        .encode("utf-8", "surrogatepass")
    )


def _place(document: dict[str, Any], draw: random.Random) -> tuple[Any, Any]:
    """A container and one of its keys, at a depth that is as likely as any other."""
    holder: Any = document
    key: Any = ""
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    return holder, key


def edit_lines(raw: bytes, draw: random.Random) -> bytes:
    """One line of JSON lines changes, goes, or moves."""
    lines = raw.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    kind = draw.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(draw.randrange(len(lines) + 1), lines[at])
    else:
        lines[at] = edit_json(lines[at], draw) + b"\n"
    return b"".join(lines)


# ------------------------------------------------------------------------------------------- TOML
def edit_toml(raw: bytes, draw: random.Random) -> bytes:
    """A value, a key or a line of TOML becomes another, goes, or stands twice."""
    lines = raw.decode().split("\n")
    keyed = [i for i, line in enumerate(lines) if " = " in line] or [0]
    at = draw.choice(keyed)
    key, _, value = lines[at].partition(" = ")
    kind = draw.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        lines[at] = (
            f"{draw.choice(('a.' * 90 + 'b', 'a.' * 3000 + 'b', key + '.x', '', '[x]'))} = {value}"
        )
    elif kind == 3:
        lines.insert(
            at, draw.choice(("[a]", "[[a]]", f"[{key}]", f"[[{key}]]", "[" + "a." * 90 + "b]"))
        )
    else:
        lines[at] = f"{key} = {draw.choice(_TOML)}"
    return "\n".join(lines).encode()


# ----------------------------------------------------------------------------------------- pickle
@lru_cache(64)
def _opcodes(raw: bytes) -> list[bytes]:
    starts = [at for _, _, at in pickletools.genops(raw) if at is not None]
    return [raw[a:b] for a, b in zip(starts, [*starts[1:], len(raw)], strict=True)]


def edit_pickle(raw: bytes, draw: random.Random) -> bytes:
    """An opcode becomes another, goes, moves, stands twice, or has another argument."""
    opcodes = list(_opcodes(raw))
    at = draw.randrange(len(opcodes))
    kind = draw.randrange(7)
    if kind == 0:
        del opcodes[at]
    elif kind == 1:
        opcodes.insert(at, opcodes[at])
    elif kind == 2:
        other = draw.randrange(len(opcodes))
        opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
    elif kind == 3:
        opcodes[at:at] = draw.choices(_OPCODES, k=draw.randrange(1, 4))
    elif kind == 4:
        opcodes[at] = draw.choice(_OPCODES)
    elif kind == 5:
        opcodes[at] = draw.choice(opcodes)
    else:
        opcodes[at] = opcodes[at][:1] + edit_bytes(opcodes[at][1:], draw)
    return b"".join(opcodes)


# -------------------------------------------------------------------------------------- zip, arrays
@lru_cache(64)
def _entries(raw: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def edit_zip(raw: bytes, draw: random.Random) -> bytes:
    """A sound archive with another entry in it; or its directory, spoilt in its place."""
    if draw.random() < 0.25:
        start = raw.index(b"PK\1\2")
        return raw[:start] + edit_bytes(raw[start:], draw)
    entries = list(_entries(raw))
    inner = [i for i, (name, _) in enumerate(entries) if name.endswith((".pkl", ".npy"))]
    at = draw.choice(inner) if inner and draw.random() < 0.8 else draw.randrange(len(entries))
    name, content = entries[at]
    kind = draw.randrange(12)
    if kind == 0:
        del entries[at]
    elif kind == 1:
        entries[at] = (
            draw.choice(("../x", "/x", "", "a/b/c", "x" * 3000, "\x1b[31m.npy")),
            content,
        )
    elif kind == 2:
        entries.append((name + draw.choice(("", "2")), content))
    else:
        language = {"pkl": "pickle", "npy": "npy"}.get(name.rpartition(".")[2], "")
        with contextlib.suppress(ValueError):  # an earlier edit left no opcodes
            content = LANGUAGES.get(language, edit_bytes)(content, draw)
        entries[at] = (name, content)
    method = draw.choice((0, 0, 0, 0, 0, 0, 8, 12, 14))
    found = io.BytesIO()
    with _quiet(), zipfile.ZipFile(found, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return found.getvalue()


@contextlib.contextmanager
def _quiet() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a name stands twice is what is wanted
        yield


def edit_npy(raw: bytes, draw: random.Random) -> bytes:
    """A value in the header of an array becomes another; the length of the header follows it."""
    (length,) = struct.unpack_from("<H", raw, 8)
    header = raw[10 : 10 + length].decode("latin-1")
    values = re.findall(r"'[<>|][^']*'|\([^)]*\)|True|False", header)
    header = header.replace(draw.choice(values), draw.choice((*_NPY, *values)), 1)
    if draw.random() < 0.1:
        header = header.replace("'", draw.choice(('"', "")), 1)
    spelled = header.encode("latin-1")
    claimed = len(spelled) if draw.random() < 0.9 else draw.choice((0, 1, 65535))
    if len(spelled) > 65535:
        raise ValueError
    return raw[:8] + struct.pack("<H", claimed) + spelled + raw[10 + length :]


def edit_safetensors(raw: bytes, draw: random.Random) -> bytes:
    """A value of the header becomes another; its length follows it."""
    length = int.from_bytes(raw[:8], "little")
    header = (edit_json if draw.random() < 0.7 else edit_bytes)(raw[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def edit_gguf(raw: bytes, draw: random.Random) -> bytes:
    """The settings and the table of tensors, which begin the file."""
    end = min(len(raw), draw.choice((64, 600, 9000)))
    return edit_bytes(raw[:end], draw) + raw[end:]


# ---------------------------------------------------------------------------------------- Parquet
def edit_parquet(raw: bytes, draw: random.Random) -> bytes:
    """A column becomes another or has another type; or the footer is spoilt in its place."""
    if draw.random() < 0.35:
        (size,) = struct.unpack_from("<I", raw, len(raw) - 8)
        start = max(len(raw) - 8 - size, 0)
        return raw[:start] + edit_bytes(raw[start:], draw)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(raw))
        found = io.BytesIO()
        pq.write_table(_other_table(table, draw), found)
    except (pa.ArrowException, OSError, OverflowError, TypeError):
        raise ValueError from None
    return found.getvalue()


def _other_table(table: Any, draw: random.Random) -> Any:
    import pyarrow as pa

    at, rows = draw.randrange(table.num_columns), table.num_rows
    name = table.column_names[at]
    kind = draw.randrange(9)
    if kind == 0:
        return table.remove_column(at)
    if kind == 1:
        return table.append_column(name, table.column(at))
    if kind == 2:
        return table.rename_columns([*table.column_names[:at], "x" * draw.choice((0, 1, 3000)), *table.column_names[at + 1 :]])  # fmt: skip
    if kind == 3:
        return table.slice(0, draw.choice((0, 1, max(rows - 1, 0))))
    if kind == 4:
        return table.set_column(at, name, table.column(draw.randrange(table.num_columns)))
    if kind == 5:
        values = table.column(at).to_pylist()
        if values:
            values[draw.randrange(rows)] = draw.choice((None, *_numbers(values[0], draw)))
        return table.set_column(at, name, pa.array(values, table.schema.field(at).type))
    made = draw.choice(_COLUMNS)(rows, draw)
    return table.set_column(at, name, made)


def _numbers(like: Any, draw: random.Random) -> Sequence[Any]:
    if isinstance(like, str):
        return "", "x", "\x1b[31m", "a" * 5000
    if isinstance(like, float):
        return float("nan"), float("inf"), -1.0, 1e308, 0.0
    if isinstance(like, list):
        return [], [None], like * 3
    return -1, 0, 1, 2**15, 2**31 - 1, 2**62


def _arrow(values: Callable[[int], list[Any]], kind: str) -> Callable[[int, random.Random], Any]:
    def make(rows: int, _: random.Random) -> Any:
        import pyarrow as pa

        types = {
            "text": pa.string(), "null": pa.null(), "float": pa.float64(), "half": pa.float16(),
            "int": pa.int64(), "bytes": pa.binary(), "bool": pa.bool_(), "list": pa.list_(pa.int32()),
            "lists": pa.list_(pa.list_(pa.float32())), "time": pa.timestamp("ns"),
            "struct": pa.struct({"a": pa.int8()}), "decimal": pa.decimal128(38, 3), "u64": pa.uint64(),
        }  # fmt: skip
        if kind == "dictionary":
            return pa.array(values(rows), pa.string()).dictionary_encode()
        return pa.array(values(rows), types[kind])

    return make


_COLUMNS = [
    _arrow(lambda n: ["x"] * n, "text"), _arrow(lambda n: [None] * n, "null"), _arrow(lambda n: [float("nan")] * n, "float"),
    _arrow(lambda n: [0.5] * n, "float"), _arrow(lambda n: [-1] * n, "int"), _arrow(lambda n: [2**62] * n, "int"),
    _arrow(lambda n: [None] * n, "int"), _arrow(lambda n: [b"x"] * n, "bytes"), _arrow(lambda n: [True] * n, "bool"),
    _arrow(lambda n: [[1] * (i % 3) for i in range(n)], "list"), _arrow(lambda n: [[1]] * n, "list"),
    _arrow(lambda n: [[[1.0]]] * n, "lists"), _arrow(lambda n: [0] * n, "time"), _arrow(lambda n: [{"a": 1}] * n, "struct"),
    _arrow(lambda n: [1] * n, "decimal"), _arrow(lambda n: [2**64 - 1] * n, "u64"), _arrow(lambda n: ["x"] * n, "dictionary"),
    _arrow(lambda n: [None] * n, "list"),
]  # fmt: skip


LANGUAGES: dict[str, Edit] = {
    "json": edit_json, "jsonl": edit_lines, "toml": edit_toml, "pickle": edit_pickle, "zip": edit_zip,
    "npy": edit_npy, "safetensors": edit_safetensors, "gguf": edit_gguf, "parquet": edit_parquet,
}  # fmt: skip
