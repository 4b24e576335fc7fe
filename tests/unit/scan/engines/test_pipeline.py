"""A whole scan on devices writes what a scan on the processor writes, and says where it ran."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moegeom import pipeline
from moegeom.core.errors import UsageError
from moegeom.engine.devices.choice import choose_devices
from moegeom.engine.request import ScanRequest
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

    def start(self, num_tokens: int) -> None:
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
