"""The learning rate over a training."""

import math
from collections.abc import Callable

WARMUP_STEPS = 50


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """Factor on the learning rate: up over the first steps, then down to a twentieth."""
    warmup = max(1, min(WARMUP_STEPS, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
