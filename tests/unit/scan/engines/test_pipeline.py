"""A whole scan on devices writes what a scan on the processor writes, and says where it ran and why."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moegeom import pipeline
from moegeom.core.errors import UsageError
from moegeom.core.tokens import SourceFacts
from moegeom.engine.devices.choice import LEAST_TOKENS, ON_THE_PROCESSOR, PRODUCT, choose_devices
from moegeom.engine.request import ScanRequest
from moegeom.kernels.cuda.device import DeviceError
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.studies.check.study import GateRequest, gate
from tests.emulator.emulated_device import EmulatedDevice
from tests.unit.scan.engines.scanned import exact_product, inputs, router_of
from tests.unit.scan.made import Recorded

SAMPLE = Path(__file__).parents[4] / "sample_ckpts" / "olmoe-balanced"

#: Sums of probabilities far out in a tail, where the last digits of a length count many times.
OF_TAILS = ("bf16_flip_share_isotropic", "bf16_flip_share_isotropic_se")


class Heard:
    """What a watch is told."""

    def __init__(self, stop_at: str = "") -> None:
        self.said: list[str] = []
        self.advanced, self.total, self._stop_at = 0, 0, stop_at

    def start(self, num_tokens: int, unit: str = "") -> None:
        self.total = num_tokens

    def begin(self, what: str) -> None:
        if what == self._stop_at:
            raise KeyboardInterrupt

    def advance(self, num_tokens: int) -> None:
        self.advanced += num_tokens

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def gpus(monkeypatch) -> list[EmulatedDevice]:
    """Two devices instead of those of the host."""
    found = [EmulatedDevice(seed=number, product=exact_product) for number in range(2)]
    chosen = functools.partial(choose_devices, count=lambda: 2, opened=found.__getitem__)
    monkeypatch.setattr(pipeline, "choose_devices", chosen)
    return found


def scan(out: Path, device: str | None, watch: Heard | None = None, **changes) -> Path:
    request = ScanRequest(
        checkpoint=str(SAMPLE / "step_1500"),
        tokens=str(SAMPLE / "rec/step_1500"),
        out=out,
        device=device,
        layers="1",
    )
    return pipeline.scan(dataclasses.replace(request, **changes), watch)


def table_of(folder: Path, table: str) -> list[dict]:
    return pq.read_table(folder / f"{table}.parquet").to_pylist()


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text("utf-8"))


def assert_same_tables(found: Path, expected: Path) -> None:
    """Counts differ by ambiguous tokens at most, numbers by what lengths are rounded to."""
    layers = table_of(expected, "layers")
    ambiguous = max(round((r["ambiguous_share"] or 0.0) * r["num_tokens"]) for r in layers)
    assert ambiguous < 20
    for table in ("layers", "experts"):
        ours, theirs = table_of(found, table), table_of(expected, table)
        assert len(ours) == len(theirs) > 0
        for row, other in zip(ours, theirs, strict=True):
            assert list(row) == list(other)
            for name, value in other.items():
                if isinstance(value, float):
                    rtol = 1e-4 if name in OF_TAILS else 1e-5
                    np.testing.assert_allclose(row[name], value, rtol, atol=1e-12, err_msg=name)
                elif isinstance(value, int):
                    assert abs(row[name] - value) <= ambiguous, name
                else:
                    assert row[name] == value, name


def assert_same_tokens(found: Path, expected: Path) -> None:
    """Rows of tokens that are not ambiguous are the same."""
    ours, theirs = (
        pq.read_table(folder / "tokens/text.1.parquet").to_pydict() for folder in (found, expected)
    )
    assert list(ours) == list(theirs)
    for name in ("token", "chosen", "expert_out", "expert_in"):
        same = np.array([a == b for a, b in zip(ours[name], theirs[name], strict=True)])
        assert same.mean() > 0.999, name
    for name in ("margin", "boundary_distance", "boundary_distance_upper"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-2, atol=2e-5)


def test_results_of_devices_are_those_of_the_processor(gpus, tmp_path):
    heard, expected = Heard(), scan(tmp_path / "cpu", "cpu", per_token=True)
    results = scan(tmp_path / "out", "cuda", heard, per_token=True, batch_tokens=1024)
    assert_same_tables(results, expected)
    assert_same_tokens(results, expected)
    assert heard.said == ["device: emulated device, emulated device; asked for with --device cuda"]
    assert heard.advanced == heard.total == 4096
    assert all(device.launches for device in gpus)
    facts = facts_of(results)["device"]
    assert (facts["kind"], facts["asked"]) == ("cuda", "cuda")
    assert facts["names"] == ["emulated device"] * 2
    assert facts_of(expected)["device"]["kind"] == "cpu"


def test_auto_stays_on_the_processor_and_a_gate_on_devices_says_the_same(gpus, tmp_path):
    """Where nothing was asked for, that is not worth a line."""
    line = "device: the processor; 4,096 tokens at 1 router are done before a GPU has started"
    for asked, said in (("auto", [line]), (None, []), ("cpu", [])):
        heard = Heard(stop_at="text/1")
        with pytest.raises(KeyboardInterrupt):
            scan(tmp_path / f"out_{asked}", asked, heard)
        assert heard.said == said
    assert not any(device.launches for device in gpus)
    target, tokens = str(SAMPLE / "step_1500"), str(SAMPLE / "rec/step_1500")
    reports = [
        gate(GateRequest(target=target, tokens=tokens, layers="1", device=device))
        for device in ("cuda", "cpu")
    ]
    assert gpus[0].launches
    assert [report.run["device"]["kind"] for report in reports] == ["cuda", "cpu"]
    states = [{o.code: o.state for o in report.verdict.outcomes} for report in reports]
    assert states[0] == states[1]


def test_an_interrupted_scan_goes_on_on_the_same_kind_of_device_alone(gpus, tmp_path):
    """A product of another device may differ in the last bit: what is begun there stays there."""
    out, layers = tmp_path / "out", {"layers": "0-1"}
    with pytest.raises(KeyboardInterrupt):
        scan(out, "cuda", Heard(stop_at="text/1"), **layers)
    done = [len(device.launches) for device in gpus]
    with pytest.raises(UsageError) as refused:
        scan(out, "cpu", **layers)
    assert "unfinished results of another run: device differ" in str(refused.value)
    heard = Heard()
    scan(out, "cuda:1", heard, **layers)  # fewer of them are the same kind
    assert heard.advanced == heard.total == 8192  # of which one router was finished before
    assert len(gpus[0].launches) == done[0]
    assert len(table_of(out, "layers")) > 0


def test_a_router_that_devices_do_not_route_is_scanned_on_the_processor_and_it_is_said():
    router = router_of(weight=router_of().weight.astype(np.float64))
    device, tokens, said = EmulatedDevice(), Recorded(inputs(300, 8)), []
    run = RouterRun(router, tokens, [METRICS["tokens"]], devices=(device,), on_message=said.append)
    measured = measure_router(run)
    assert said == ["router text/0: on the processor, since rows are stored in float64"]
    assert measured.facts["num_tokens"] == 300
    assert not device.launches


# ------------------------------------------------------------------------------------- which device
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
