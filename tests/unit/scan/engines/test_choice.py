"""Where a scan runs follows from what was asked, what there is to do, and what is there; the engine
of devices costs no time to import, and CuPy is there only once a device is opened.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import moegeom
from moegeom.core.errors import UsageError
from moegeom.core.tokens import SourceFacts
from moegeom.engine.devices.choice import LEAST_TOKENS, ON_THE_PROCESSOR, PRODUCT, choose_devices
from moegeom.kernels.cuda.device import DeviceError
from tests.emulator.emulated_device import EmulatedDevice


def source_of(tokens: int = LEAST_TOKENS, stage: str = "router_input") -> SourceFacts:
    return SourceFacts("recorded", stage, tokens, ("text/0",), (), True, False)


class Host:
    """A host with so many GPUs, some ``broken``; remembers which were opened, and each count."""

    def __init__(self, gpus: int | DeviceError, broken: dict[int, str] | None = None) -> None:
        self.gpus, self.broken, self.opened, self.counted = gpus, broken or {}, [], 0

    def count(self) -> int:
        self.counted += 1
        if isinstance(self.gpus, DeviceError):
            raise self.gpus
        return self.gpus

    def open(self, number: int) -> EmulatedDevice:
        if not isinstance(self.gpus, int) or number >= self.gpus:
            raise DeviceError(f"There is no device cuda:{number}; found none.")
        if number in self.broken:
            raise DeviceError(self.broken[number])
        self.opened.append(number)
        device = EmulatedDevice()
        device.name = f"GPU {number}"
        return device

    def choose(self, choice: str, source: SourceFacts | None = None, routers: int = 1):
        return choose_devices(choice, source, routers, self.count, self.open)


ABSENT = DeviceError("CuPy is not installed.", "pip install it")


def test_the_processor_is_taken_when_asked_for_and_facts_of_a_choice_are_plain():
    host = Host(2)
    choice = host.choose("cpu", source_of())
    assert choice is ON_THE_PROCESSOR
    assert (choice.kind, choice.devices, host.counted) == ("cpu", (), 0)
    assert choice.text == "device: the processor; asked for with --device cpu"
    on_gpu = Host(1).choose("cuda:0").facts()
    facts = {"kind": "cuda", "asked": "cuda:0", "names": ["GPU 0"], "product": PRODUCT}
    assert on_gpu == facts | {"why": "asked for with --device cuda:0"}
    assert json.loads(json.dumps(on_gpu)) == on_gpu
    facts = {"kind": "cpu", "asked": "cpu", "names": [], "why": "asked for with --device cpu"}
    assert ON_THE_PROCESSOR.facts() == facts


OPENED = {
    "cuda": [0, 1, 2],
    "cuda:1": [1],
    "cuda:2,0": [2, 0],
    "cuda:1,1,0": [1, 0],
    "cuda:00": [0],
}


@pytest.mark.parametrize("option", OPENED)
def test_gpus_that_are_asked_for_are_opened_whatever_there_is_to_do(option):
    for source in (None, source_of(1)):
        host = Host(3)
        choice = host.choose(option, source)
        assert host.opened == OPENED[option]
        assert [device.name for device in choice.devices] == [f"GPU {n}" for n in host.opened]
        assert (choice.kind, choice.option) == ("cuda", option)
        assert choice.why == f"asked for with --device {option}"


def test_no_gpu_where_one_was_asked_for_is_an_error():
    """Numbers are not checked by counting: whoever opens a GPU knows best that it is not there."""
    host = Host(1)
    with pytest.raises(DeviceError, match="There is no device cuda:7"):
        host.choose("cuda:7")
    assert host.counted == 0
    with pytest.raises(DeviceError) as refused:
        Host(0).choose("cuda")
    assert str(refused.value) == (
        "--device cuda: CuPy finds no GPU.\n  hint: `moegeom doctor` says what is there."
    )
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        Host(ABSENT).choose("cuda")
    with pytest.raises(DeviceError, match="GPU 1"):
        Host(3, {1: "NVRTC writes no code for GPU 1."}).choose("cuda", source_of())


def test_anything_else_is_refused_with_what_is_expected():
    options = "|gpu|CUDA|cuda:|cuda:a|cuda:-1|cuda:0,|cuda:,0|cuda:0;1|cuda 0|cuda:1.0|cuda:²|"
    host, hint = Host(2), "\n  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1."
    for option in (*options.split("|"), "cuda:1000", "auto:0", "cpu:0", "cuda:0:1"):
        with pytest.raises(UsageError) as refused:
            host.choose(option, source_of())
        assert str(refused.value) == f"--device {option}: unknown device.{hint}"
    assert (host.opened, host.counted) == ([], 0)


def test_auto_takes_every_gpu_that_can_be_used_where_there_is_enough_to_do():
    for stage in ("router_input", "logits"):
        choice = Host(2).choose("auto", source_of(LEAST_TOKENS // 4, stage), 4)
        assert (choice.kind, choice.option) == ("cuda", "auto")
        assert choice.why == "262,144 tokens at 4 routers are worth starting it"
        assert choice.text == f"device: GPU 0, GPU 1; {choice.why}"
    host = Host(3, {1: "NVRTC writes no code for GPU 1."})
    choice = host.choose("auto", source_of())
    assert host.opened == [0, 2]
    assert choice.why.endswith(" are worth starting it (NVRTC writes no code for GPU 1.)")


FEW, NOT_ROUTED = source_of(LEAST_TOKENS - 1), "the recording holds {}, which a GPU does not route"


@pytest.mark.parametrize(
    ("host", "source", "reason", "counts"),
    [
        (Host(2), FEW, "1,048,575 tokens at 1 router are done before a GPU has started", 0),
        *(
            (Host(2), source_of(stage=stage), NOT_ROUTED.format(stage.replace("_", " ")), 0)
            for stage in ("pre_norm", "top_logits", "ids", "counts")
        ),
        (Host(2), None, "there are no tokens to route", 0),
        (Host(0), source_of(), "CuPy finds no GPU", 1),
        (Host(ABSENT), source_of(), "CuPy is not installed.", 1),
        (Host(1, {0: "cuBLAS is missing."}), source_of(), "cuBLAS is missing.", 1),
    ],
)
def test_auto_stays_on_the_processor_and_says_why(host, source, reason, counts):
    choice = host.choose("auto", source)
    assert (choice.devices, choice.kind, choice.option) == ((), "cpu", "auto")
    assert choice.text == f"device: the processor; {reason}"
    assert host.counted == counts


#: What takes long to import, or needs not be installed.
HEAVY = ("numba", "torch", "scipy", "sklearn", "pandas", "matplotlib", "cupy", "cupyx")

PACKAGE = Path(moegeom.__file__).parent

#: Imports modules, and says for each heavy package which module asked for it first.
SCRIPT = """
import json, sys
heavy, by = sys.argv[2:], {}
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in by:
            frame = sys._getframe()
            while frame and not frame.f_globals.get("__name__", "").startswith("moegeom"):
                frame = frame.f_back
            by[name] = frame.f_globals["__name__"] if frame else "another package"
sys.meta_path.insert(0, Spy())
for name in sys.argv[1].split(","): __import__(name)
print(json.dumps({name: by[name] for name in by if name in sys.modules}))
"""


def loaded_by(*modules: str, heavy: tuple[str, ...] = HEAVY) -> dict[str, str]:
    """Heavy packages that are loaded with modules, and what imports them."""
    command = [sys.executable, "-c", SCRIPT, ",".join(modules), *heavy]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_module_of_the_devices_loads_anything_heavy_and_one_that_does_is_named():
    modules = [
        f"moegeom.{folder.replace('/', '.')}.{file.stem}"
        for folder in ("kernels/cuda", "engine/devices")
        for file in (PACKAGE / folder).glob("[a-z]*.py")
    ]
    assert {"moegeom.engine.devices.cuda", "moegeom.kernels.cuda.device"} <= {*modules}
    assert loaded_by(*modules) == {}
    seen = loaded_by("moegeom.core.router", heavy=("numpy",))
    assert seen["numpy"].startswith("moegeom.")
