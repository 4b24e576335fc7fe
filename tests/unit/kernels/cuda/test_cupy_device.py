"""What can be said of a GPU without one: which reason is given."""

from __future__ import annotations

import importlib

import pytest

from moegeom.kernels.cuda import cupy_device
from moegeom.kernels.cuda.device import DeviceError


def test_a_missing_library_of_cuda_is_named_with_what_brings_it(monkeypatch):
    importlib.import_module("cupy")  # its own imports come before they are replaced

    def load(name: str):
        assert name.startswith("cupy_backends.cuda.libs.")
        raise ImportError("libcublas.so.13 is nowhere\nsecond line")

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(DeviceError) as refused:
        cupy_device.need_libraries()
    assert refused.value.message == "CuPy misses a library of CUDA: libcublas.so.13 is nowhere."
    assert "cupy-cuda13x[ctk]" in refused.value.hint


def test_without_cupy_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="CuPy is not installed") as refused:
        cupy_device.count_devices()
    assert "moegeom[cuda13]" in refused.value.hint


@pytest.mark.parametrize(("count", "known"), [(0, "none"), (1, "cuda:0"), (3, "cuda:0 to cuda:2")])
@pytest.mark.parametrize("index", [-1, 3, 99])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch, count, known, index
):
    monkeypatch.setattr(cupy_device, "count_devices", lambda: count)
    with pytest.raises(DeviceError, match=f"no device cuda:{index}; found {known}."):
        cupy_device.open_device(index)
