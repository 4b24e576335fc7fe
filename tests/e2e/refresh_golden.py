"""Writes the expected screens in tests/e2e/golden anew; review them as a difference.

python tests/e2e/refresh_golden.py
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    os.environ["MOEGEOM_REFRESH_GOLDEN"] = "1"
    tests = ("tests/e2e/test_screen.py", "tests/e2e/test_golden_documents.py")
    sys.exit(
        subprocess.call([sys.executable, "-m", "pytest", "-q", *tests, "-k", "golden"], cwd=ROOT)
    )
