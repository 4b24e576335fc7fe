"""Work in processes that are killed: forked from one that has imported everything.

So the time is spent in the work and not in imports; SIGKILL runs no handler.
"""

from __future__ import annotations

import os
import subprocess
import sys

#: Forks a child for each line and prints, once the child is gone, how it ended.
LOOP = """
import os, sys
for line in sys.stdin:
    child = os.fork()
    if not child:
        work(*line.split())
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forker:
    """``code`` defines ``work``, which a child of its own does with the words of each line."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + LOOP, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def run(self, *words: object) -> int:
        """0, or how the child ended."""
        print(*words, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
