"""The hook of tests/conftest.py does check shapes, in every module that can be checked."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap

import jaxtyping
import numpy as np
import pytest

from tests.architecture.sources import ROOT, SOURCES, parsed


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
