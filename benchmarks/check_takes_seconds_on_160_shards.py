"""Claim: the gate on the weights of a 690 GB checkpoint reads 0.2 GB and takes seconds.

The checkpoint of opening_reads_only_headers_and_routers.py: 160 shards, 58 routers and one for
multi-token prediction, 256 experts of 7168 numbers each. Prints bytes read over (index + config +
headers of the shards with a router + routers, biases and norms), and the time of `moegeom check`
over that of parsing the same headers and reading the same tensors, and of `moegeom scan` of the
weights alone over that of the check, in alternation, the least of each; and which of numba,
scikit-learn and torch the check imported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from opening_reads_only_headers_and_routers import Seconds, bare, write_checkpoint

from moegeom.engine.request import ScanRequest
from moegeom.pipeline import lint, scan
from moegeom.studies.check.study import GateRequest, gate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = write_checkpoint(folder)
        files = ("model.safetensors.index.json", "config.json")
        needed = shape.needed_bytes + sum((folder / file).stat().st_size for file in files)
        run = lint(str(folder)).run
        print(f"bytes read over needed: {run['checkpoint']['bytes_read'] / needed:.4f}")
        gate(GateRequest(str(folder)))
        heavy = [name for name in ("numba", "sklearn", "torch") if name in sys.modules]
        print(f"the check imported of numba, sklearn, torch: {heavy or 'none'}")
        out = folder / "results"
        scan(ScanRequest(str(folder), out=out))  # imports what writes
        again = ScanRequest(str(folder), out=out, overwrite=True)
        checked, least, scanned = Seconds(), Seconds(), Seconds()
        for _ in range(repeats):
            checked = checked.least(lambda: gate(GateRequest(str(folder))))
            least = least.least(lambda: bare(folder, shape, with_hash=False))
            scanned = scanned.least(lambda: scan(again))
        print(f"time of the check over bare: {checked.clock / least.clock:.1f}")
        print(f"time of a scan of the weights over the check: {scanned.clock / checked.clock:.2f}")
        print(
            f"(check {checked.clock:.1f} s, scan {scanned.clock:.1f} s, bare {least.clock:.2f} s)"
        )
        assert np.isfinite(checked.clock)


if __name__ == "__main__":
    main()
