"""Counts the rooms of the main road: `python docs/walks.py` follows one scan through its calls.

A room is a module that a call enters; a climb is a call into a package that stands higher in the
layers of pyproject.toml than the caller's. Of the first 400 calls behind `pipeline.scan`.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "sample_ckpts/olmoe-balanced"

#: Calls that are counted.
CALLS = 400


def layers() -> dict[str, int]:
    """Package -> its height: 0 for the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    (order,) = (c["layers"] for c in contracts["contracts"] if c["id"] == "layers")
    heights = enumerate(reversed(order))
    return {name.strip("() "): height for height, row in heights for name in row.split("|")}


def walk(call: Any, first: str) -> list[tuple[str, str]]:
    """Caller and callee of each call from module to module, from the first call of ``first`` on."""
    calls: list[tuple[str, str]] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        callee = str(frame.f_globals.get("__name__", ""))
        caller = "" if frame.f_back is None else str(frame.f_back.f_globals.get("__name__", ""))
        is_begun = calls or f"{callee}:{frame.f_code.co_name}" == first
        if event == "call" and callee.startswith("moegeom.") and is_begun and len(calls) < CALLS:
            calls.append((caller, callee))

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    from moegeom.pipeline import ScanRequest, scan

    def scanned(out: str) -> None:
        tokens = str(SAMPLE / "rec/step_1500")
        scan(ScanRequest(str(SAMPLE / "step_1500"), Path(folder) / out, tokens=tokens))

    with tempfile.TemporaryDirectory() as folder:
        scanned("first")  # whose imports are no calls of the road
        calls = walk(lambda: scanned("second"), "moegeom.pipeline:scan")
    heights = layers()

    def height(module: str) -> int:
        return heights.get(module.split(".")[1], -1)

    moves = [(caller, callee) for caller, callee in calls if caller != callee]
    rooms = {callee for _, callee in calls}
    climbs = [
        (caller, callee)
        for caller, callee in moves
        if caller.startswith("moegeom.") and height(callee) > height(caller)
    ]
    print(f"{len(calls)} calls: {len(rooms)} modules entered, {len(climbs)} climbs")
    for caller, callee in sorted(set(climbs)):
        print(f"  {caller} -> {callee}")


if __name__ == "__main__":
    main()
