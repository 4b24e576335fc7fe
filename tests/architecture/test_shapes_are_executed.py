"""What tests rest on: shapes are checked in every module that can be, no comparison stands alone, and
what is built once for a folder is built by one worker.
"""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from tests.architecture.sources import ROOT, SOURCES, parsed
from tests.schedule import FIRST, MODELS, WHOLE, piece_of, place_of


@pytest.fixture
def conftest(pytestconfig: pytest.Config):
    """The loaded tests/conftest.py."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(p for p in plugins if getattr(p, "__file__", "") == str(ROOT / "tests/conftest.py"))


PLANTED = textwrap.dedent(
    '''
    """A module with one true and one wrong annotation."""

    from __future__ import annotations

    from collections.abc import Callable
    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Literal, Protocol

    import numpy as np
    from moegeom.core.shapes import Float

    if TYPE_CHECKING:
        from fractions import Fraction


    def row_norm(weight: Float[np.ndarray, "experts hidden"]) -> Float[np.ndarray, "experts"]:
        return np.linalg.norm(weight, axis=1)


    def wrong_axis(weight: Float[np.ndarray, "experts hidden"]) -> Float[np.ndarray, "experts"]:
        return np.linalg.norm(weight, axis=0)


    def scale(factor: float, weight: Float[np.ndarray, "experts hidden"]) -> np.ndarray:
        return factor * weight


    def print_fraction(value: Fraction) -> str:
        return str(value)


    class Source(Protocol):
        """What cannot be tested with isinstance."""

        name: str


    def name_of(source: Source | None, weight: Float[np.ndarray, "experts hidden"]) -> str:
        return source.name if source else ""


    def choose(kind: Literal["rms", "layer"], pick: Callable[[int], Source]) -> str:
        return kind


    @dataclass(frozen=True)
    class Pair:
        """Two arrays that share an axis."""

        logits: Float[np.ndarray, "tokens m"]
        norm: Float[np.ndarray, "tokens"]
    '''
)


@pytest.fixture
def planted(tmp_path, monkeypatch, conftest):
    package = tmp_path / "planted_shapes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plain.py").write_text(PLANTED, "utf-8")
    (package / "compiled.py").write_text("from numba import njit\n", "utf-8")
    names = conftest.checked_modules(package)
    assert names == ["planted_shapes.plain"]
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook(names, conftest.TYPECHECKER):
        yield importlib.import_module("planted_shapes.plain")
    for name in [n for n in sys.modules if n.split(".")[0] == "planted_shapes"]:
        del sys.modules[name]


def test_a_true_annotation_passes(planted):
    np.testing.assert_array_equal(planted.row_norm(np.eye(3, 5)), np.ones(3))
    assert planted.scale(2, np.eye(2)).trace() == 4.0


def test_a_wrong_result_shape_fails(planted):
    with pytest.raises(jaxtyping.TypeCheckError, match="wrong_axis"):
        planted.wrong_axis(np.ones((3, 5)))


def test_a_wrong_argument_fails(planted):
    with pytest.raises(jaxtyping.TypeCheckError, match="row_norm"):
        planted.row_norm(np.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError, match="row_norm"):
        planted.row_norm(np.ones((3, 5), dtype=np.int64))


def test_what_cannot_be_executed_is_left_alone(planted):
    assert planted.print_fraction(3) == "3"
    assert planted.name_of(None, np.eye(2)) == ""
    assert planted.choose("batch", str) == "batch"


def test_the_rest_of_such_a_signature_is_still_checked(planted):
    with pytest.raises(jaxtyping.TypeCheckError, match="name_of"):
        planted.name_of(None, np.ones(2))
    with pytest.raises(jaxtyping.TypeCheckError, match="scale"):
        planted.scale("2", np.eye(2))


@pytest.mark.wrong_arguments
def test_the_marker_lets_wrong_arguments_through(planted):
    assert planted.row_norm(np.ones((2, 2), dtype=np.int64)).shape == (2,)


def test_fields_of_a_record_share_their_axes(planted):
    planted.Pair(logits=np.ones((4, 2)), norm=np.ones(4))
    with pytest.raises(jaxtyping.TypeCheckError):
        planted.Pair(logits=np.ones((4, 2)), norm=np.ones(3))


def test_moegeom_itself_is_hooked():
    from moegeom.core.tokens import TopLogits

    with pytest.raises(jaxtyping.TypeCheckError):
        TopLogits(np.ones((4, 2), np.float32), np.ones((3, 2), np.int32))


def test_only_compiled_kernels_escape_the_hook(conftest):
    """Numba is imported by kernels, by walks over cells and for bits of sets alone: nothing goes
    unchecked by accident.
    """
    compiled = (
        "moegeom/kernels/cpu/",
        "moegeom/routing_cells/walk/",
        "moegeom/routing_cells/ball/",
        "moegeom/studies/faults/_bits.py",
    )
    outside = [
        file
        for file, source in SOURCES.items()
        if conftest.imports(source, "numba") and not file.startswith(compiled)
    ]
    assert outside == []


def test_names_in_annotations_exist_at_run_time():
    """A name imported only for type checkers cannot be executed, so it is not used for shapes."""
    offenders = []
    for file, source in SOURCES.items():
        for node in ast.walk(parsed(source)):
            is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if is_guard and any(word in ast.unparse(node) for word in ("numpy", "core.shapes")):
                offenders.append(f"{file}:{node.lineno}")
    assert offenders == []


# ------------------------------------------------------------------------------ dropped comparisons
TESTS = Path(__file__).resolve().parents[1]

#: Calls that answer yes or no (element by element, too) and do nothing else.
PREDICATES = frozenset(
    """
    all allclose any array_equal array_equiv bool callable can_cast compare digest_equal
    endswith eq equal equals exists frame_equal greater greater_equal hasattr identical
    in1d isclose isdigit isdisjoint isfinite isin isinf isinstance isnan isneginf isposinf
    issubclass issubdtype issubset issuperset istrue less less_equal logical_and logical_not
    logical_or logical_xor ne not_equal samefile same shares_memory may_share_memory startswith
    """.split()
)
PREFIXES = ("is_", "has_", "have_", "are_", "equal", "same_", "approx_equal", "almost_equal")


def last_name(node: ast.expr) -> str:
    """``np.testing.x`` -> ``x``; empty for anything that has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class DroppedComparisons(ast.NodeVisitor):
    """Collects ``(line, source)`` of every yes-or-no answer that is thrown away."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._local: set[str] = set()
        while True:  # until no more local helper turns out to be a predicate
            known = len(self._local)
            for node in ast.walk(tree):
                self._learn(node)
            if len(self._local) == known:
                break
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and self._is_predicate(last_name(node.value)):
            self._local.update(last_name(target) for target in node.targets)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            if self._is_answer(node.value.body):
                self._local.update(last_name(target) for target in node.targets)
        elif isinstance(node, ast.FunctionDef):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            is_bool = node.returns is not None and ast.unparse(node.returns) in ("bool", "'bool'")
            if is_bool or (returns and all(self._is_answer(value) for value in returns)):
                self._local.add(node.name)

    def _is_predicate(self, name: str) -> bool:
        if not name or name.startswith("assert"):
            return False
        return name in PREDICATES or name in self._local or name.lstrip("_").startswith(PREFIXES)

    def _is_answer(self, node: ast.expr) -> bool:
        match node:
            case ast.Compare():
                return True
            case ast.UnaryOp(op=ast.Not() | ast.Invert()):
                return True
            case ast.BoolOp(values=values):  # `a and b.append(c)` does something
                return self._is_answer(values[-1])
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr(), left=left, right=right):
                return self._is_answer(left) and self._is_answer(right)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return any(self._is_answer(element) for element in elements)
            case (
                ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.GeneratorExp(elt=element)
            ):
                return self._is_answer(element)
            case ast.Call(func=function):
                return self._is_predicate(last_name(function))
            case ast.Await(value=value):
                return self._is_answer(value)
        return False

    def visit_With(self, node: ast.With) -> None:
        contexts = [item.context_expr for item in node.items]
        names = {last_name(c.func) for c in contexts if isinstance(c, ast.Call)}
        if not names & {"raises", "warns", "deprecated_call"}:
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if self._is_answer(node.value):
            self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        if isinstance(node.test, ast.Tuple) and node.test.elts:
            self.found.append((node.lineno, ast.unparse(node)))


def dropped(source: str) -> list[tuple[int, str]]:
    return DroppedComparisons(parsed(textwrap.dedent(source))).found


def test_every_comparison_is_asserted():
    found = {
        str(file.relative_to(TESTS)): dropped(file.read_text("utf-8"))
        for file in sorted(TESTS.rglob("*.py"))
    }
    assert len(found) > 100
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "a == b",
        "not a",
        "np.allclose(a, b)",
        "np.testing.suppress_warnings; np.array_equal(a, b)",
        "line.startswith('x')",
        "is_sorted(values)",
        "router.has_bias()",
        "equal_within(a, b, 1e-6)",
        "np.allclose(a, b).all()",
        "(a < b) & (b < c)",
        "[np.isclose(x, y) for x, y in pairs]",
        "check_equal = np.array_equal\ncheck_equal(a, b)",
        "def agree(a, b):\n    return np.allclose(a, b)\nagree(1, 2)",
        "def agree(a, b) -> bool:\n    for x in a:\n        return f(x)\nagree(1, 2)",
        "def agree(a):\n    return inner(a)\ndef inner(a):\n    return a == 1\nagree(1)",
        "for x in y:\n    with open(x) as f:\n        f.read() == ''",
        "async def test():\n    await has_value(x)",
        "assert (a == b, 'message')",
    ],
)
def test_a_dropped_comparison_is_found(source):
    assert len(dropped(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert a == b",
        "np.testing.assert_allclose(a, b)",
        "assert_equal_shapes(a, b)",
        "same = a == b\nassert same",
        "with pytest.raises(TypeError):\n    a < b",
        "def agree(a, b):\n    return np.allclose(a, b)\nassert agree(1, 2)",
        "def build(a):\n    return a + 1\nbuild(1)",
        "'''a == b'''",
        "values.append(a == b)",
        "seen and seen.append(1)",
        "yielded = [x == 1 for x in y]",
    ],
)
def test_an_asserted_comparison_is_left_alone(source):
    assert dropped(source) == []


# ----------------------------------------------------------------------------------------- schedule
def test_a_folder_with_fixtures_is_one_piece_and_every_other_file_its_own():
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        above = [p for p in file.parents if p.is_relative_to(ROOT / "tests") and p.name != "tests"]
        whole = [folder for folder in above if (folder / "conftest.py").exists()]
        piece = piece_of(f"{name}::test_a[b::c/d]")
        if name.startswith(MODELS):
            assert piece == "tests/families"
        elif whole:
            assert piece == whole[0].relative_to(ROOT).as_posix()
        else:
            assert piece in {name, *WHOLE}
            assert Path(name).is_relative_to(piece)


def test_folders_that_begin_are_there():
    folders = (*FIRST, *MODELS)
    assert [folder for folder in folders if not list((ROOT / folder).glob("test_*.py"))] == []


def test_whole_folders_come_before_files_and_large_files_before_small_ones():
    for one, later in (
        (("tests/parity", 1), ("tests/architecture", 99)),
        (("tests/e2e", 1), ("tests/unit/scan", 99)),
        (("tests/unit/scan", 1), ("tests/unit/api/test_a.py", 99)),
        (("tests/unit/api/test_b.py", 9), ("tests/unit/api/test_a.py", 8)),
    ):
        assert place_of(*one) < place_of(*later)
