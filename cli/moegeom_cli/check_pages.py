"""The page of a check, for a terminal and for the documentation."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moegeom.checks.pages import Page

_NEEDS = {
    "weights": "the weights alone",
    "tokens": "tokens (--tokens)",
    "baseline": "a baseline (--baseline)",
    "baseline and tokens": "tokens, and a baseline that was made with tokens",
}


def render_page(page: Page, width: int) -> str:
    """The page as text of at most ``width`` columns."""
    check = page.check
    lines = [
        f"{check.code}  {check.severity}: {check.title}",
        "",
        *_filled(f"Holds: {page.statement}", width),
    ]
    for name, text in page.sections.items():
        lines += ["", *_filled(f"{name}: {text}", width)]
    lines += ["", f"Needs: {_NEEDS[check.inputs]}."]
    if check.limits:
        lines += ["", f"Limits, changed in moegeom.toml under [limits.{check.code}]:"]
        for limit in check.limits:
            lines += _filled(
                f"{limit.name} = {limit.default:g}  {limit.text} ({limit.basis})", width, "  "
            )
    return "\n".join(lines)


def page_as_markdown(page: Page) -> str:
    """The same as a section of the documentation."""
    check = page.check
    parts = [f"## {check.code}", f"**{page.statement[0].upper()}{page.statement[1:]}**"]
    parts.append(f"Default severity: {check.severity}. Needs {_NEEDS[check.inputs]}.")
    parts += [f"*{name}*: {text}" for name, text in page.sections.items()]
    if check.limits:
        rows = [
            f"| `{limit.name}` | {limit.default:g} | {limit.text} | {limit.basis} |"
            for limit in check.limits
        ]
        parts.append("\n".join(["| limit | default | | basis |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
