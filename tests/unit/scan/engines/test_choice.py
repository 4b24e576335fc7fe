"""Where a scan runs follows from what was asked, what there is to do, and what is there."""

from __future__ import annotations

import json

import pytest

from moegeom.core.errors import UsageError
from moegeom.core.tokens import SourceFacts
from moegeom.engine.devices.choice import (
    LEAST_TOKENS,
    ON_THE_PROCESSOR,
    PRODUCT,
    DeviceChoice,
    choose_devices,
)
from moegeom.kernels.cuda.device import DeviceError
from tests.emulator.emulated_device import EmulatedDevice


def source_of(tokens: int = LEAST_TOKENS, stage: str = "router_input") -> SourceFacts:
    return SourceFacts("recorded", stage, tokens, ("text/0",), (), True, False)


class Host:
    """A host with so many GPUs; remembers which were opened and how often they were counted."""

    def __init__(self, gpus: int | DeviceError) -> None:
        self.gpus, self.opened, self.counted = gpus, [], 0

    def count(self) -> int:
        self.counted += 1
        if isinstance(self.gpus, DeviceError):
            raise self.gpus
        return self.gpus

    def open(self, number: int) -> EmulatedDevice:
        if not isinstance(self.gpus, int) or number >= self.gpus:
            raise DeviceError(f"There is no device cuda:{number}; found none.")
        self.opened.append(number)
        device = EmulatedDevice()
        device.name = f"GPU {number}"
        return device

    def choose(self, asked: str, source: SourceFacts | None = None, routers: int = 1):
        return choose_devices(asked, source, routers, self.count, self.open)


def names(choice: DeviceChoice) -> list[str]:
    return [device.name for device in choice.devices]


def test_the_processor_is_taken_when_asked_for_and_no_gpu_is_looked_for():
    host = Host(2)
    choice = host.choose("cpu", source_of())
    assert choice is ON_THE_PROCESSOR
    assert (choice.kind, names(choice), host.counted) == ("cpu", [], 0)
    assert choice.text == "device: the processor; asked for with --device cpu"


@pytest.mark.parametrize(
    ("asked", "opened"),
    [
        ("cuda", [0, 1, 2]),
        ("cuda:1", [1]),
        ("cuda:2,0", [2, 0]),
        ("cuda:1,1,0,1", [1, 0]),
        ("cuda:00", [0]),
    ],
)
@pytest.mark.parametrize("source", [None, source_of(1)])
def test_gpus_that_are_asked_for_are_opened_whatever_there_is_to_do(asked, opened, source):
    host = Host(3)
    choice = host.choose(asked, source)
    assert host.opened == opened
    assert names(choice) == [f"GPU {number}" for number in opened]
    assert (choice.kind, choice.asked) == ("cuda", asked)
    assert choice.why == f"asked for with --device {asked}"


def test_numbers_are_not_checked_by_counting():
    """Whoever opens a GPU knows best that it is not there, and says so."""
    host = Host(1)
    with pytest.raises(DeviceError, match="There is no device cuda:7"):
        host.choose("cuda:7")
    assert host.counted == 0


def test_no_gpu_where_one_was_asked_for_is_an_error():
    with pytest.raises(DeviceError) as refused:
        Host(0).choose("cuda")
    assert str(refused.value) == (
        "--device cuda: CuPy finds no GPU.\n  hint: `moegeom doctor` says what is there."
    )
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        Host(DeviceError("CuPy is not installed.")).choose("cuda")


@pytest.mark.parametrize(
    "asked",
    "|gpu|CUDA|Cpu|cuda:|cuda:a|cuda:-1|cuda:0,|cuda:,0|cuda:0;1|cuda 0|cuda:1.0|cuda:²|cuda:1000|"
    "auto:0|cpu:0|cuda:0:1".split("|"),
)
def test_anything_else_is_refused_with_what_is_expected(asked):
    host = Host(2)
    with pytest.raises(UsageError) as refused:
        host.choose(asked, source_of())
    assert str(refused.value) == (
        f"--device {asked}: unknown device.\n  hint: Expected auto, cpu, cuda, cuda:1 or cuda:0,1."
    )
    assert (host.opened, host.counted) == ([], 0)


@pytest.mark.parametrize("stage", ["router_input", "logits"])
def test_auto_takes_every_gpu_where_there_is_enough_to_do(stage):
    host = Host(2)
    choice = host.choose("auto", source_of(LEAST_TOKENS // 4, stage), 4)
    assert (names(choice), choice.kind, choice.asked) == (["GPU 0", "GPU 1"], "cuda", "auto")
    assert choice.why == "262,144 tokens at 4 routers are worth starting it"
    assert choice.text == f"device: GPU 0, GPU 1; {choice.why}"


def test_auto_stays_on_the_processor_where_there_is_too_little_to_do():
    host = Host(2)
    choice = host.choose("auto", source_of(LEAST_TOKENS - 1))
    assert (choice.devices, choice.asked, host.counted) == ((), "auto", 0)
    assert choice.why == "1,048,575 tokens at 1 router are done before a GPU has started"


@pytest.mark.parametrize("stage", ["pre_norm", "top_logits", "ids", "counts"])
def test_auto_stays_on_the_processor_for_stages_that_a_gpu_does_not_route(stage):
    host = Host(2)
    choice = host.choose("auto", source_of(stage=stage))
    assert (choice.devices, host.counted) == ((), 0)
    assert choice.why == (
        f"the recording holds {stage.replace('_', ' ')}, which a GPU does not route"
    )


def test_auto_stays_on_the_processor_without_tokens_and_without_gpus():
    assert Host(2).choose("auto").why == "there are no tokens to route"
    assert Host(0).choose("auto", source_of()).why == "CuPy finds no GPU"
    absent = Host(DeviceError("CuPy is not installed.", "pip install it"))
    choice = absent.choose("auto", source_of())
    assert choice.text == "device: the processor; CuPy is not installed."


def test_auto_takes_the_gpus_that_can_be_used_and_says_what_is_wrong_with_others():
    host, work = Host(3), source_of(LEAST_TOKENS)

    def opened(number: int):
        if number == 1:
            raise DeviceError("NVRTC writes no code for GPU 1.")
        return host.open(number)

    choice = choose_devices("auto", work, 1, lambda: 3, opened)
    assert names(choice) == ["GPU 0", "GPU 2"]
    assert choice.why.endswith(" are worth starting it (NVRTC writes no code for GPU 1.)")
    with pytest.raises(DeviceError, match="GPU 1"):
        choose_devices("cuda", work, 1, lambda: 3, opened)

    def none_opened(number: int):
        raise DeviceError("cuBLAS is missing.")

    choice = choose_devices("auto", work, 1, lambda: 3, none_opened)
    assert (choice.devices, choice.why) == ((), "cuBLAS is missing.")


def test_facts_of_a_choice_are_plain_and_say_how_logits_are_computed():
    host = Host(1)
    on_gpu = host.choose("cuda:0").facts()
    assert on_gpu == {
        "kind": "cuda",
        "asked": "cuda:0",
        "names": ["GPU 0"],
        "why": "asked for with --device cuda:0",
        "product": PRODUCT,
    }
    assert json.loads(json.dumps(on_gpu)) == on_gpu
    assert ON_THE_PROCESSOR.facts() == {
        "kind": "cpu",
        "asked": "cpu",
        "names": [],
        "why": "asked for with --device cpu",
    }
