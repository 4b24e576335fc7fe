"""Where a scan runs: on the processor, or on which GPUs, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moegeom.core.errors import UsageError
from moegeom.core.text import number_of
from moegeom.core.tokens import SourceFacts
from moegeom.engine.devices.device_router import DEVICE_STAGES
from moegeom.kernels.cuda.cupy_device import count_devices, open_device
from moegeom.kernels.cuda.device import Device, DeviceError

#: Tokens times routers below which ``auto`` stays on the processor: a GPU takes seconds to start
#: and to compile its kernels, in which a processor routes about so many. An estimate.
LEAST_TOKENS = 2**20


@dataclass(frozen=True)
class DeviceChoice:
    """``devices`` is empty for the processor; ``why`` is one sentence."""

    devices: tuple[Device, ...]
    option: str
    why: str

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``: what a scan that goes on must find again."""
        return "cuda" if self.devices else "cpu"

    @property
    def text(self) -> str:
        """Where, and why, for a line on the screen."""
        names = ", ".join(device.name for device in self.devices) or "the processor"
        return f"device: {names}; {self.why}"

    def facts(self) -> dict[str, Any]:
        """For ``run.json``."""
        names = [device.name for device in self.devices]
        facts = {"kind": self.kind, "asked": self.option, "names": names, "why": self.why}
        return facts | ({"product": PRODUCT} if self.devices else {})


#: How a device computes logits, for ``run.json``.
PRODUCT = (
    "float32 accumulation; bfloat16 inputs times rows in one bfloat16 term where that is exact, "
    "else in three; float32 inputs times float32 rows, without TF32"
)

ON_THE_PROCESSOR = DeviceChoice((), "cpu", "asked for with --device cpu")


def choose_devices(
    option: str,
    source: SourceFacts | None,
    num_routers: int,
    count: Callable[[], int] = count_devices,
    opened: Callable[[int], Device] = open_device,
) -> DeviceChoice:
    """``cpu``, ``cuda`` (every GPU there is), ``cuda:1``, ``cuda:0,2``, or ``auto``.

    ``auto`` takes every GPU for a recording of inputs or logits of at least ``LEAST_TOKENS`` tokens
    times routers, and the processor else.

    Raises
    ------
    UsageError
        For anything else.
    DeviceError
        When a GPU was asked for and is not there.
    """
    if option == "cpu":
        return ON_THE_PROCESSOR
    if option != "auto":
        numbers = _numbers(option, count)
        why = f"asked for with --device {option}"
        return DeviceChoice(tuple(opened(number) for number in numbers), option, why)
    if reason := _against(source, num_routers):
        return DeviceChoice((), option, reason)
    device_by_number, reasons = usable_devices(count, opened)
    devices = tuple(device_by_number.values())
    if not devices:
        return DeviceChoice((), option, " ".join(reasons) or "CuPy finds no GPU")
    assert source is not None
    why = f"{_work(source, num_routers)} are worth starting it"
    return DeviceChoice(devices, option, " ".join([why, *(f"({text})" for text in reasons)]))


def usable_devices(
    count: Callable[[], int] = count_devices, opened: Callable[[int], Device] = open_device
) -> tuple[dict[int, Device], list[str]]:
    """GPUs that can be used, by number, and why others cannot."""
    try:
        numbers = range(count())
    except DeviceError as error:
        return {}, [error.message]
    devices: dict[int, Device] = {}
    reasons: dict[str, None] = {}  # each once, in order
    for number in numbers:
        try:
            devices[number] = opened(number)
        except DeviceError as error:
            reasons[error.message] = None
    return devices, list(reasons)


def _against(source: SourceFacts | None, num_routers: int) -> str:
    """Why ``auto`` does not even look for a GPU."""
    if source is None:
        return "there are no tokens to route"
    if source.stage not in DEVICE_STAGES:
        return f"the recording holds {source.stage.replace('_', ' ')}, which a GPU does not route"
    if source.num_tokens * num_routers < LEAST_TOKENS:
        return f"{_work(source, num_routers)} are done before a GPU has started"
    return ""


def _work(source: SourceFacts, num_routers: int) -> str:
    routers = number_of(num_routers, "router")
    return f"{number_of(source.num_tokens, 'token')} at {routers}"


def refuse_unknown_device(option: str) -> None:
    """Raises UsageError for what is no device; whether it is there is not checked."""
    kind, colon, listed = option.partition(":")
    is_listed = all(part.isdecimal() and len(part) < 4 for part in listed.split(","))
    if option not in ("auto", "cpu", "cuda") and not (kind == "cuda" and colon and is_listed):
        raise UsageError(
            f"--device {option}: unknown device.", "Expected auto, cpu, cuda, cuda:1 or cuda:0,1."
        )


def _numbers(option: str, count: Callable[[], int]) -> list[int]:
    refuse_unknown_device(option)
    _, colon, listed = option.partition(":")
    if colon:
        return list(dict.fromkeys(int(part) for part in listed.split(",")))
    num_devices = count()
    if not num_devices:
        raise DeviceError(
            "--device cuda: CuPy finds no GPU.", "`moegeom doctor` says what is there."
        )
    return list(range(num_devices))
