"""What every file of the packages owes its reader."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, SOURCES, parsed

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
