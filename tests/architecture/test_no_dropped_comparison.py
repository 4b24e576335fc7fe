"""A comparison that nobody reads tests nothing: none stands alone in the tests.

Found: a comparison as a statement, a call of a predicate (``np.allclose(...)``, ``is_finite(...)``)
as a statement, and an assertion on a non-empty tuple. Inside ``with pytest.raises(...)`` the
statement is the test, so it is left alone.
"""

import ast
import textwrap
from pathlib import Path

import pytest

from tests.architecture.sources import parsed

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
