"""What files of the packages owe their reader; output gets its names in one place, input is opened
in few. Plug-ins are found where they stand, several to a module of their kin.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from moegeom.core.errors import InternalError, UsageError
from moegeom.core.registry import Rooms, modules_of
from tests.architecture.sources import ROOT, SOURCES, parsed

#: Modules of Python that Windows has not.
POSIX = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog")


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func


def renames(source: str) -> list[int]:
    """Lines in which something gets another name: of ``os``, of ``shutil`` and of paths."""
    found = []
    for node, called in calls(parsed(source)):
        module = called.value.id if isinstance(called.value, ast.Name) else ""
        of_system = module == "os" and called.attr in ("replace", "rename", "renames")
        of_path = (
            called.attr in ("replace", "rename")
            and len(node.args) == 1
            and not node.keywords
            and module != "dataclasses"
        )
        if of_system or of_path or (module == "shutil" and called.attr == "move"):
            found.append(node.lineno)
    return found


def opens_by_name(source: str, names: dict[str, tuple[str, ...]]) -> list[int]:
    """Lines that call one of ``names``: module to functions."""
    return [
        node.lineno
        for node, called in calls(parsed(source))
        if isinstance(called.value, ast.Name) and called.attr in names.get(called.value.id, ())
    ]


#: Where a folder of results gives way to a new one, whole both of them.
MAY_RENAME = {"moegeom/core/files.py", "moegeom/studies/track/steps.py"}

#: What parses TOML and Parquet of others within bounds, and what reads files of the program itself.
MAY_PARSE = {"moegeom/core/documents.py": "TOML", "moegeom/core/parquet.py": "Parquet"}

UNBOUNDED = {
    "tomllib": ("load", "loads"),
    "pq": ("read_table", "ParquetFile", "read_metadata", "read_schema"),
    "parquet": ("read_table", "ParquetFile", "read_metadata"),
}


#: What opens files for reading, and why; everything else uses moegeom.core.files, which refuses
#: what is no regular file: a pipe is waited for, a device has no end.
MAY_OPEN = {
    "moegeom/core/documents.py": "part of the program",
    "moegeom/core/extras.py": "what pip wrote beside the program",
    "moegeom/core/files.py": "open_raw itself, and outputs",
    "moegeom/core/parquet.py": "Parquet, behind open_raw",
    "moegeom/tokens/foreign/npy.py": "an archive, behind the reader of archives of checkpoints",
    "moegeom/results/plans.py": "an array out of a file that is open",
    "moegeom/kernels/cuda/program.py": "part of the program",
    "cli/moegeom_cli/commands/doctor.py": "/proc/cpuinfo",
    "moegeom/results/writer.py": "waits until folders that it wrote are on the disk",
    "moegeom/tokens/recording/journal.py": "the journal, for writing, inside a folder of its own; "
    "waits until files that it wrote are on the disk",
}

#: What parses JSON of others within bounds.
MAY_PARSE_JSON = {"moegeom/core/documents.py"}

#: Functions that open a file by its name.
OPENERS = {
    "os": ("open",),
    "io": ("open", "FileIO"),
    "np": ("load", "fromfile", "memmap", "loadtxt", "genfromtxt"),
    "zipfile": ("ZipFile",),
    "torch": ("load",),
    "pq": ("read_table", "ParquetFile", "read_metadata", "read_schema"),
    "pa": ("memory_map", "OSFile", "input_stream"),
}


def opened(source: str) -> list[int]:
    """Lines that open a file for reading by its name."""
    found = opens_by_name(source, OPENERS)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.lineno] * (node.func.id in ("open", "FileIO", "ZipFile"))
    for node, called in calls(parsed(source)):
        keys = {keyword.arg for keyword in node.keywords}
        mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        of_path = called.attr == "open" and (
            (isinstance(mode, str) and "r" in mode and len(mode) < 4)
            or keys & {"mode", "encoding", "errors", "buffering"}
        )
        whole = called.attr == "read_text" or (called.attr == "read_bytes" and not node.args)
        found += [node.lineno] * bool((of_path and mode not in ("w", "a", "wb", "ab")) or whole)
    return found


def parsed_json(source: str) -> list[int]:
    """Lines that parse JSON which was not made in the same place."""
    return [
        node.lineno
        for node, called in calls(parsed(source))
        if isinstance(called.value, ast.Name)
        and (called.value.id, called.attr) in (("json", "loads"), ("json", "load"))
        and "json.dumps" not in ast.unparse(node.args[0])
    ]


@pytest.mark.parametrize(
    ("search", "line", "is_met"),
    [
        (renames, "os.replace(a, b)", True),
        (renames, "partial.replace(out)", True),
        (renames, "Path(a).rename(b)", True),
        (renames, "shutil.move(a, b)", True),
        (renames, "text.replace('a', 'b')", False),
        (renames, "dataclasses.replace(record)", False),
        (renames, "replace(record, a=1)", False),
        (opened, "path.open('rb')", True),
        (opened, "path.open(encoding='utf-8')", True),
        (opened, "Path(a).read_bytes()", True),
        (opened, "path.read_text('utf-8')", True),
        (opened, "open(path)", True),
        (opened, "os.open(path, flags)", True),
        (opened, "np.load(path)", True),
        (opened, "pq.ParquetFile(path)", True),
        (opened, "zipfile.ZipFile(path)", True),
        (opened, "store.read_bytes(name, 0, 8)", False),
        (opened, "archive.open(info)", False),
        (opened, "scheme.open(location)", False),
        (opened, "path.open('wb')", False),
        (opened, "path.open('a', encoding='utf-8')", False),
        (opened, "open_regular(path)", False),
        (parsed_json, "json.loads(text)", True),
        (parsed_json, "json.load(file)", True),
        (parsed_json, "json.loads(json.dumps(plan))", False),
        (parsed_json, "parse_json(raw)", False),
    ],
)
def test_a_search_meets_the_calls_that_it_is_for(search, line, is_met):
    assert search(line) == [1] * is_met


def test_one_module_gives_files_their_names():
    found = {
        f"{file}:{line}"
        for file, source in SOURCES.items()
        for line in renames(source)
        if file not in MAY_RENAME
    }
    assert found == set(), "use moegeom.core.files.write_whole or move_folder"


def test_toml_and_parquet_of_others_are_parsed_within_bounds():
    found = {
        f"{file}:{line}"
        for file, source in SOURCES.items()
        for line in opens_by_name(source, UNBOUNDED)
        if file not in MAY_PARSE
    }
    assert found == set(), "use moegeom.core.documents or moegeom.core.parquet"


def test_files_of_others_are_opened_where_pipes_and_devices_are_refused():
    found = {file for file, source in SOURCES.items() if opened(source)}
    assert found == set(MAY_OPEN), "use moegeom.core.files.open_regular or read_regular"


def test_json_of_others_is_parsed_within_bounds():
    found = {file for file, source in SOURCES.items() if parsed_json(source)}
    assert found == MAY_PARSE_JSON, "use moegeom.core.documents.parse_json"


IMPORT_ALL = """
import contextlib, importlib, pkgutil, sys
with contextlib.suppress(ImportError):
    import transformers.trainer_callback  # brings what has a module for each system
for name in {posix!r}:
    sys.modules[name] = None  # an import of it fails, as on Windows
# what a library needs of the system it asks for itself, and does without on Windows
absent = []
for package in ("moegeom", "moegeom_cli"):
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if any(name in str(error) for name in {posix!r}):
                absent.append((module.name, str(error)))
            elif not {optional!r}.intersection(str(error).replace("'", " ").split()):
                raise
print(absent)
sys.exit(bool(absent))
"""

#: Libraries of extras, which may be missing.
OPTIONAL = ("cupy", "cuda", "torch", "transformers", "huggingface_hub", "fsspec")


def test_no_module_imports_what_only_posix_has():
    imports = re.compile(rf"^ *(?:from|import) (?:{'|'.join(POSIX)})\b", re.MULTILINE)
    assert [file for file, source in SOURCES.items() if imports.search(source)] == []
    assert imports.search("if x:\n    import fcntl\n")


@pytest.mark.nightly
def test_every_module_is_imported_where_libraries_find_nothing_of_posix_either():
    code = IMPORT_ALL.format(posix=POSIX, optional=set(OPTIONAL))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


#: A file that outgrows this knows too many variants: split it by variant.
MAX_LINES = 900

LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
EM_DASH = chr(0x2014)

#: What was done to a thing, where its reader asks what it is and which.
PARTICIPLES = frozenset(
    "asked drawn found gathered given held kept known looked placed said shown told wanted".split()
)

#: What binds a name: kind of node -> where it holds the name.
BINDERS = {ast.Name: "id", ast.arg: "arg", ast.ExceptHandler: "name", ast.MatchAs: "name"}

#: Bindings of these names that are left to be replaced by nouns, by room.
PARTICIPLES_LEFT = "engine 1, recorder 1, router 1, studies/routes 1, tokens 2"


def test_every_module_says_what_it_is():
    # an empty __init__.py has nothing to say
    written = {name: text for name, text in SOURCES.items() if text.strip()}
    assert [name for name, text in written.items() if not ast.get_docstring(parsed(text))] == []


def test_no_module_is_too_long():
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_module_holds_leftovers():
    found = {name: LEFTOVERS.findall(text) for name, text in SOURCES.items()}
    assert {name: words for name, words in found.items() if words} == {}
    assert [name for name, text in SOURCES.items() if EM_DASH in text] == []


@pytest.mark.parametrize("package", ["moegeom", "cli/moegeom_cli"])
def test_every_folder_with_modules_is_a_package(package):
    """A folder without __init__.py is invisible to import-linter and to the shape hook."""
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert sorted(missing) == []


def test_one_class_has_one_name():
    """A reader who meets a name in two places must not have to ask which one it is."""
    homes: dict[str, list[str]] = {}
    library = {name: text for name, text in SOURCES.items() if name.startswith("moegeom/")}
    for name, text in library.items():
        for node in parsed(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_names_of_files_and_classes_name_a_thing():
    vague = PARTICIPLES | set("base common helper helpers manager misc util utils".split())
    classes = (n for text in SOURCES.values() for n in ast.walk(parsed(text)))
    names = [Path(name).stem for name in SOURCES]
    names += [one.name for one in classes if isinstance(one, ast.ClassDef)]
    assert [name for name in names if name.strip("_").lower() in vague] == []


def test_variables_name_a_thing():
    """A room that ``PARTICIPLES_LEFT`` does not list has none; in another the number only falls."""
    left = {room: int(n) for room, n in re.findall(r"(\S+) (\d+)", PARTICIPLES_LEFT)}
    places: dict[str, list[str]] = {}
    for file, text in SOURCES.items():
        room = "/".join(Path(file).parts[1 : 3 if "/studies/" in file else 2])
        for node in ast.walk(parsed(text)):
            name = getattr(node, BINDERS.get(type(node), ""), None) or ""
            is_read = isinstance(getattr(node, "ctx", None), ast.Load)
            if name.strip("_") in PARTICIPLES and not is_read:
                places.setdefault(room, []).append(f"{file}:{getattr(node, 'lineno', 0)} {name}")
    assert {room: at for room, at in places.items() if len(at) > left.get(room, 0)} == {}


def test_no_test_is_timed():
    """A busy machine is slow: `tests.ends` guards against work without end, benchmarks have ratios."""
    clocks = re.compile(r"\b(process_time|perf_counter|thread_time)\(\)")
    timed = [
        file for file in (ROOT / "tests").rglob("*.py") if clocks.search(file.read_text("utf-8"))
    ]
    assert sorted(file.name for file in timed) == ["ends.py"]


# ----------------------------------------------------------------------------------------- plug-ins
FAMILIES = sorted((ROOT / "moegeom/router/families").glob("*.toml"))


def all_rooms() -> list[Rooms]:
    """Every ``NAME = Rooms(...)`` at the top of a module."""
    rooms = []
    for file, source in SOURCES.items():
        for node in parsed(source).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and re.match("Rooms", ast.unparse(value.func)):
                name = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
                target = ast.unparse(node).partition("=")[0].partition(":")[0].strip()
                rooms.append(getattr(importlib.import_module(name), target))
    return rooms


def test_every_record_of_a_room_is_found_by_its_name():
    rooms = all_rooms()
    assert sum(len(room.names()) for room in rooms) > 280
    assert [n for room in rooms for n in room.names() if room[n].name != n] == []


def test_every_module_of_a_folder_of_plugins_holds_one():
    records = {}
    for room in all_rooms():
        records.setdefault(room._package, []).append(room._record)
    empty = [
        f"{package}.{place}"
        for package, kinds in records.items()
        for place in modules_of(package)
        if not any(
            isinstance(value, tuple(kinds))
            for value in vars(importlib.import_module(f"{package}.{place}")).values()
        )
    ]
    assert empty == []


@dataclass(frozen=True)
class Planted:
    """A record that a test puts into a package."""

    name: str


def test_two_records_of_one_name_in_different_rooms_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    rooms = tmp_path / "planted_rooms"
    rooms.mkdir()
    (rooms / "__init__.py").touch()
    source = "from tests.architecture.test_writing import Planted\n\nONE = Planted('one')\n"
    (rooms / "first.py").write_text(source, "utf-8")
    (rooms / "_private.py").write_text(source, "utf-8")
    assert Rooms("plant", "planted_rooms", Planted).names() == ["one"]
    with pytest.raises(UsageError, match="Unknown plant 'on'. Did you mean one"):
        Rooms("plant", "planted_rooms", Planted)["on"]
    (rooms / "second.py").write_text(source, "utf-8")
    with pytest.raises(InternalError, match="second defines a plant named 'one'"):
        Rooms("plant", "planted_rooms", Planted).names()


def test_every_family_file_is_a_table():
    assert len(FAMILIES) > 100
    assert [file.stem for file in FAMILIES if not tomllib.loads(file.read_text("utf-8"))] == []


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_contributing_says_how_to_add_to_every_folder_of_plugins():
    unsaid = []
    for room in all_rooms():
        folder = room._package.replace(".", "/")
        rows = [line for line in CONTRIBUTING.splitlines() if f"`{folder}/<" in line]
        if len(rows) != 1 or f"`{room._record.__name__}`" not in rows[0]:
            unsaid.append(folder)
    assert unsaid == []
    assert (
        "| command | `cli/moegeom_cli/commands/<command>.py`, of `moegeom list` in" in CONTRIBUTING
    )


def test_every_folder_of_tests_is_in_contributing():
    folders = {f"tests/{f.name}" for f in (ROOT / "tests").iterdir() if any(f.glob("*.py"))}
    assert folders - set(re.findall(r"^\| `(tests/\w+)` \|", CONTRIBUTING, re.MULTILINE)) == set()
