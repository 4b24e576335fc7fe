"""A program as users write it; `make types` reads it, and finds the mistakes that are marked."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import numpy as np

import moegeom as mg


def main() -> list[str]:
    checkpoint = mg.open("model", layers="0-3")
    scanned = mg.scan(checkpoint, "rec", exclude_first=1, arithmetics=["bf16"], out="results")
    verdict = mg.check(checkpoint, baseline="baseline.json", select="MGI")
    imbalance = mg.imbalance(checkpoint, {"text/0": np.zeros((8, 4))}, layers=0)
    mg.imbalance(checkpoint, "rec", expert=True)  # pyright: ignore[reportCallIssue]
    mg.scan(checkpoint, seed="one")  # pyright: ignore[reportArgumentType]
    _ = imbalance.value.routers[0].causes  # pyright: ignore[reportAttributeAccessIssue]
    codes = [finding.code for finding in (*scanned.findings, *verdict.value.verdict.findings)]
    return [*codes, *(router.cause for router in imbalance.value.routers)]
