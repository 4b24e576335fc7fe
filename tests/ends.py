"""Work that ends: guards against what would go on for minutes, not measures of speed.

How fast something is depends on what else a machine does: benchmarks/ has ratios. What is guarded
here takes seconds at most; without the guard it takes many minutes, or never ends.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Processor seconds, a multiple of what any guarded work takes on a machine that others use too.
LIMIT = 60.0


@contextmanager
def work_ends() -> Iterator[None]:
    """Fails where the processor worked on longer than anything guarded may take."""
    started = time.process_time()
    yield
    assert time.process_time() - started < LIMIT
