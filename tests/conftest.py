"""Shapes and types are executed in tests, and Hypothesis is repeatable.

Every module of moegeom that names a shape and does not import Numba is imported through jaxtyping's
hook, so a shape annotation that lies fails the test that calls it. Compiled functions cannot be
wrapped; their shapes are held by the parity tests against the reference, which is wrapped. The
other annotations are pyright's: to execute them takes as long as the tests themselves, so that the
modules without shapes are hooked at night alone.
"""

import collections
import functools
import gc
import inspect
import os
import re
import shutil
import sys
import tempfile
import threading
import types
import typing
from pathlib import Path

import beartype
import hypothesis
import jaxtyping
import pytest

from tests.by_day import IS_NIGHT
from tests.costs import Costs
from tests.records import RUN

PACKAGE = Path(__file__).resolve().parents[1] / "moegeom"

#: jaxtyping takes the type checker as source text: this is ``check`` below.
TYPECHECKER = f"sys.modules[{__name__!r}].check"

#: With the numeric tower an int is accepted where a float is annotated (PEP 484).
execute = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")

# Until the tests are collected next to nothing that was made is left behind.
gc.disable()

# Before anything imports Numba, here and in the processes that tests start.
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "tests.kernel_cache.Shared,InTreeCacheLocator")


def imports(source: str, package: str) -> bool:
    """True when a module imports something of a package anywhere, also inside a function.

    By its lines, one import on each as ruff holds them: to parse the whole package costs seconds in
    every process of the tests.
    """
    return re.search(rf"^\s*(?:from|import) {package}\b", source, re.MULTILINE) is not None


def checked_modules(package: Path) -> list[str]:
    """Dotted names to hook. A package is named only when nothing below it imports Numba.

    The hook matches by prefix, so naming a package would also take in its compiled modules: those
    that import Numba, or from ``moegeom.kernels.cpu`` how to compile.
    """
    sources = {file: file.read_text("utf-8") for file in sorted(package.rglob("*.py"))}
    compiled = {
        file
        for file, source in sources.items()
        if imports(source, "numba") or imports(source, r"moegeom\.kernels\.cpu import")
    }
    names = []
    for file, source in sources.items():
        if not IS_NIGHT and not imports(source, r"moegeom\.core\.shapes import"):
            continue
        parts = file.relative_to(package.parent).with_suffix("").parts
        if file.name == "__init__.py":
            if any(file.parent in other.parents for other in compiled):
                continue
            parts = parts[:-1]
        elif file in compiled:
            continue
        names.append(".".join(parts))
    return names


def is_executable(hint: typing.Any) -> bool:
    """Can and should a test execute this?

    Not protocols, which ``isinstance`` cannot test, nor names not yet defined, nor a ``Literal``:
    commands hand over any word, and the function refuses it in its own words.
    """
    if isinstance(hint, (str, typing.ForwardRef)):
        return False
    if isinstance(hint, typing.TypeVar):
        return is_executable(hint.__bound__)
    is_protocol = getattr(hint, "_is_protocol", False)
    if is_protocol and not getattr(hint, "_is_runtime_protocol", False):
        return False
    if typing.get_origin(hint) is typing.Literal:
        return False
    return all(is_executable(argument) for argument in typing.get_args(hint))


def check(function: typing.Callable) -> typing.Callable:
    """Execute every annotation of a function that can be; the others are left to pyright."""
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if is_executable(hint)}
    return execute(function)


#: Calls of a function that are checked in each file of tests, by day: to check the calls of a scan
#: takes longer than the scan.
CHECKED_CALLS = sys.maxsize if IS_NIGHT else 5

#: Code of a function -> its calls in the file that runs, and how often it was defined there.
num_calls: collections.Counter[types.CodeType] = collections.Counter()
num_definitions: collections.Counter[types.CodeType] = collections.Counter()

jaxtyped = jaxtyping.jaxtyped

#: The checker holds back warnings of the process while it reads annotations: threads that define
#: functions of their own would each give back what the other had taken, and warnings were lost.
one_at_a_time = threading.Lock()


def sparingly(*, typechecker: typing.Callable) -> typing.Callable:
    """``jaxtyping.jaxtyped`` for the first calls of a function in each file; of classes, for all.

    So for what a function defines inside, which would be read anew in each call of it.
    """

    def decorate(plain: typing.Any) -> typing.Any:
        if not inspect.isfunction(plain):
            return jaxtyped(typechecker=typechecker)(plain)
        code = plain.__code__
        num_definitions[code] += 1
        if num_definitions[code] > CHECKED_CALLS:
            return plain
        checked = None

        # Most functions are not called in a run of few tests: a check is made when it is needed.
        @functools.wraps(plain)
        def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            nonlocal checked
            num_calls[code] += 1
            if num_calls[code] > CHECKED_CALLS:
                return plain(*args, **kwargs)
            with one_at_a_time:
                checked = checked or jaxtyped(typechecker=typechecker)(plain)
            return checked(*args, **kwargs)

        return call

    return decorate


jaxtyping.jaxtyped = sparingly
loaded = sorted(name for name in sys.modules if name.startswith("moegeom."))
sys.modules["moegeom.core.shapes"] = jaxtyping  # which every annotation then means
if loaded:  # the hook would silently check nothing of these
    raise pytest.UsageError(f"imported before the shape checks were in place: {loaded}")
jaxtyping.install_import_hook(checked_modules(PACKAGE), TYPECHECKER)

# Time limits per example would make slow machines fail at random.
hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "nightly", max_examples=2000, deadline=None, print_blob=True, parent=None
)
hypothesis.settings.load_profile(PROFILE)


@pytest.fixture(autouse=True, scope="module")
def _calls_count_anew() -> None:
    num_calls.clear()
    num_definitions.clear()


@pytest.fixture(autouse=True)
def _no_execution(request: pytest.FixtureRequest) -> typing.Iterator[None]:
    """``wrong_arguments`` lets a call through to the message under test."""
    if request.node.get_closest_marker("wrong_arguments") is None:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@functools.cache
def why_no_gpu() -> str:
    """The reason why GPU tests cannot run here, or an empty string."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")
    if RUN not in os.environ:  # not on a worker
        os.environ[RUN] = folder = tempfile.mkdtemp(prefix="moegeom-tests-")
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not go over it again and again."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests say why they are skipped; tests marked ``nightly`` are deselected by day."""
    for item in items:
        if item.get_closest_marker("gpu") and why_no_gpu():
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))
    if not IS_NIGHT:
        at_night = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=at_night)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: typing.Any) -> typing.Any:
    from tests.schedule import Pieces

    return Pieces(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(scope="module")
def browser() -> typing.Iterator[typing.Any]:
    """A browser of this machine; its tests are skipped with the reason where there is none."""
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium and no google-chrome here: pages were not opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(
    browser: typing.Any, tmp_path: Path
) -> typing.Iterator[typing.Callable[..., typing.Any]]:
    """Opens a page from its file, and at the end has no message and no request of any page."""
    messages: list[str] = []
    contexts = []

    def open_page(
        text: str, width: int = 1280, is_silent: bool = True, **options: object
    ) -> typing.Any:
        file = tmp_path / f"{len(contexts)}.html"
        file.write_text(text, "utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        if is_silent:
            page.on("console", lambda message: messages.append(message.text))
            page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: messages.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    files = {(tmp_path / f"{number}.html").as_uri() for number in range(len(contexts))}
    assert [text for text in messages if text not in files and not text.startswith("data:")] == []
