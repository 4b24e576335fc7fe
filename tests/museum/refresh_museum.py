"""Writes docs/museum.md anew, asking the recipes of the tuned half; review it as a difference.

python -m tests.museum.refresh_museum
"""

from tests.museum.page import PAGE, render
from tests.museum.score import answered

if __name__ == "__main__":
    PAGE.write_text(render(lambda recipe: list(answered(recipe))), encoding="utf-8")
