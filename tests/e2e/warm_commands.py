"""Runs commands of the command line in children of a process that has loaded everything already.

Starting Python, Numba and ten kernels takes longer than most commands run, and so does importing
what a command imports where it is used. This script loads them once, then reads one request a line
from stdin (folder, arguments or a script, environment, folder of its streams), forks, and
answers with the exit code and the seconds of the processor. A child is as much a process of its own
as one that was started from scratch; that a cold start works is what the other tests of this folder show.
Modules that are named as arguments are loaded too. A request may say which signal the child gets, and
when, how large its files may be, and that two run at once, with streams of their own.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from moegeom.checks import CHECKS
from moegeom.core.tokens import InputNoise
from moegeom.document.model import View
from moegeom.document.render import RENDERERS, render
from moegeom.engine.batch import LazyBatch
from moegeom.engine.prepared import prepare
from moegeom.engine.task import Task
from moegeom.kernels.reduction import REDUCTIONS, Extent
from moegeom.kernels.table import load_kernels
from moegeom.pipeline import METRICS
from moegeom.variants.emulated import arithmetic, emulate
from moegeom_cli import EXIT_INTERRUPTED, __main__, app
from moegeom_cli.groups import ScreenOptions
from tests.unit.metrics.theorems import EXPERTS, HIDDEN, RULES, TOP_K, router, stream

#: Packages that commands import where they use them; none brings torch, nor matplotlib, which looks
#: for its settings in the working directory.
LAZY = "filelock pandas pyarrow.parquet scipy.stats moegeom_cli".split()
LAZY += [f"moegeom.{floor}" for floor in ("checkpoint", "router", "tokens", "document", "studies")]


def warm_up() -> None:
    """Compiled kernels and lazy imports into memory; no thread is started, so a fork is safe."""
    whole, source = router(RULES["softmax"]), stream()
    kernels = load_kernels("cpu")
    task = Task(
        prepare(whole),
        source,
        kernels,
        typical_norm=1.0,
        variant=emulate(whole, arithmetic("bf16")),
        noise=InputNoise(0.01),
    )
    found = LazyBatch(task, 0, 8)
    vars(found)["matches_recording"] = kernels["same_set"](*[found.chosen] * 2)
    vars(found)["num_chosen"] = (found.chosen >= 0).sum(axis=1, dtype=np.int32)
    extent = Extent(len(task.populations.names), EXPERTS, TOP_K, HIDDEN, source.facts.num_tokens)
    for reduction in REDUCTIONS.all():
        # no experts are read, no model runs, and a softmax has no sum that a guard could reach
        if {"jumps", "harm", "weight_sum"}.isdisjoint(reduction.needs):
            reduction.start(extent).fold(found, kernels)
    assert METRICS.all()
    assert RENDERERS.all()
    assert CHECKS.all()
    for name in LAZY:
        package = importlib.import_module(name)
        if name.startswith("moegeom"):
            for module in pkgutil.walk_packages(package.__path__, f"{name}."):
                importlib.import_module(module.name)
    with contextlib.redirect_stdout(io.StringIO()):
        app.app(
            ["list", "routers", "--help"], standalone_mode=False
        )  # what the parser imports late
    gc.collect()
    gc.freeze()  # children neither look at these objects nor copy their pages


#: Columns at which a request with ``everything`` is shown.
WIDTHS = (80, 140)


def show_everything(
    screen, document, found, is_ascii: bool = False, plots=None, *, forms: list[str]
) -> None:
    """In place of one screen: these formats, at all widths, as one JSON document."""
    views = [View(width, is_ascii=is_ascii) for width in WIDTHS]
    told = {view: document(found, view) for view in views}
    shown = {
        form: {view.width: render(told[view], form, view) for view in views}
        for form in forms
        if told[views[0]].judged is not None or not RENDERERS[form].of_verdicts
    }
    sys.stdout.write(json.dumps(shown))


#: What no command does, whatever lies around it, and what one does that is given a URL alone.
_NEVER = {"os.system", "os.exec", "os.spawn", "os.posix_spawn", "webbrowser.open"}
_WITH_URL = {"socket.connect", "socket.bind", "socket.getaddrinfo"}

#: Where the file, or the code of one, stands among the arguments of an event.
_FILE_OF = {
    "exec": 0,
    "compile": 1,
    "import": 1,
    "ctypes.dlopen": 0,
    "open": 0,
    "subprocess.Popen": 0,  # a name without a folder is taken for one of the folder
}

#: Endings of files that are code where a library loads them.
_CODE = (".py", ".pyc", ".pth", ".so", ".nbi", ".nbc", ".cubin")


def lies_in(path: object, folder: str) -> bool:
    """Whether a file lies in the folder; ``<string>`` lies nowhere."""
    if not isinstance(path, str) or path.startswith("<"):
        return False
    return os.path.normpath(Path.cwd() / path).startswith(folder + os.sep)


def run_nothing_of(folder: str, has_url: bool) -> None:
    """From here on the process ends with 99 where it runs or loads as code what lies in a folder,
    starts a program by its bare name, or asks for a connection that nobody named.
    """
    inside, never = os.path.realpath(folder), _NEVER | (set() if has_url else _WITH_URL)

    def look(event: str, values: tuple) -> None:
        file = values[_FILE_OF[event]] if event in _FILE_OF else None
        if event == "open" and not str(file).endswith(_CODE):
            return
        if event == "ctypes.dlopen" and os.sep not in str(file):
            return  # one of the system's
        if event in never or lies_in(getattr(file, "co_filename", file), inside):
            os.write(2, f"{event} {values!r:.300}\n".encode())
            os._exit(99)

    sys.addaudithook(look)


def run_script(text: str) -> None:
    """As ``python -c``; what it uses must not be deprecated."""
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})


def run_here(request: dict, streams: str) -> int:
    """The command in this process, which is a child and ends with it."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{streams}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = ["moegeom", *request["arguments"]]
    if request["forms"]:
        ScreenOptions.show = functools.partialmethod(show_everything, forms=request["forms"])
    if request["largest"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest"],) * 2)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if request["script"]:
            run_script(request["script"])
        else:
            run_nothing_of(request["folder"], any("://" in word for word in request["arguments"]))
            __main__.main()
    except KeyboardInterrupt:  # before the command began
        os.write(2, b"interrupted.\n")
        return EXIT_INTERRUPTED
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began this
    warm_up()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        signal.pthread_sigmask(
            signal.SIG_BLOCK, [signal.SIGINT]
        )  # a child lets it in when it begins
        for streams in request["streams"]:  # all at once
            children.append(os.fork())
            if children[-1] == 0:
                os._exit(run_here(request, streams))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if request["ending"]:
            number, seconds = request["ending"]
            time.sleep(seconds)
            os.kill(children[0], number)  # one that has ended was not waited for
        ends = [os.wait4(child, 0) for child in children]
        codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ends]
        seconds = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ends)
        sys.stdout.write(json.dumps([codes, seconds]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
