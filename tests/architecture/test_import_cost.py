"""Importing moegeom promises its names, and like asking for help it loads nothing heavy."""

import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import moegeom
from moegeom_cli.command import command_names

ROOT = Path(__file__).resolve().parents[2]

HEAVY = {*("cupy", "matplotlib", "numba", "pandas"), *("scipy", "sklearn", "torch", "transformers")}

HELP = """
from moegeom_cli.app import exit_code
for arguments in {screens}:
    assert exit_code(arguments) == 0
"""


def printed_by(code: str) -> list[str]:
    """Lines that ``code`` prints in a fresh interpreter, the last one what it loaded."""
    script = (
        f"import json, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'cli')!r}]\n"
        f"before = set(sys.modules)\n{code}\n"
        "print(); print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def loaded_by(code: str) -> set[str]:
    """Top-level modules that ``code`` adds to a fresh interpreter."""
    return {name.split(".")[0] for name in json.loads(printed_by(code)[-1])}


def test_import_moegeom_loads_only_itself_and_the_standard_library():
    assert loaded_by("import moegeom") - set(sys.stdlib_module_names) == {"moegeom"}


def test_help_loads_nothing_heavy():
    screens = [["--help"], *([*name.split(), "--help"] for name in command_names())]
    assert loaded_by(HELP.format(screens=screens)) & (HEAVY | {"pyarrow"}) == set()


def test_a_command_imports_no_other_command():
    code = HELP.format(screens=[["doctor", "--help"]])
    code += "print([n for n in sys.modules if n.startswith('moegeom_cli.commands.')])"
    assert printed_by(code)[-3] == "['moegeom_cli.commands.doctor']"


def test_the_measurement_sees_what_is_loaded():
    assert "decimal" in loaded_by("import decimal")


CHECKPOINT = str(ROOT / "sample_ckpts/deepseek-tiny/step_1500")


def test_a_check_of_weights_compiles_nothing_and_loads_nothing_heavy():
    typed = f"assert exit_code(['check', {CHECKPOINT!r}]) == 0"
    assert loaded_by(f"from moegeom_cli.app import exit_code; {typed}") & HEAVY == set()


def test_a_check_of_weights_from_python_loads_nothing_heavy():
    assert loaded_by(f"import moegeom; assert moegeom.check({CHECKPOINT!r})") & HEAVY == set()


def test_the_version_is_that_of_the_changelog(pytestconfig):
    changelog = (pytestconfig.rootpath / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in changelog or f"## [{moegeom.__version__}]" in changelog


def test_a_public_name_exists_and_is_documented():
    for name in moegeom._PUBLIC:
        value = getattr(moegeom, name)
        assert inspect.getdoc(value), name
        assert value.__name__ == moegeom._PUBLIC[name].partition(":")[2]
        assert name in dir(moegeom)


def test_no_public_name_hides_a_subpackage():
    """``moegeom.engine`` would be the function or the package, by what was imported before."""
    assert set(moegeom._PUBLIC) & {m.name for m in pkgutil.iter_modules(moegeom.__path__)} == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moegeom.no_such_name
