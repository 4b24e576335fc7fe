"""The page docs/museum.md: one table of every incident, from what the exhibits state.

Tests hold what is stated against what moegeom says; recipes state nothing, and are asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.generator.scoring import HEALTHY
from tests.museum.disagreement import Disagreement, Pair
from tests.museum.disagreements import DISAGREEMENTS
from tests.museum.gallery import JUDGES, SIZES, Case, Incident
from tests.museum.incidents import INCIDENTS
from tests.museum.invariances import NEUTRAL
from tests.museum.questions import SILENT, exit_of
from tests.museum.recipe import Needs, Recipe, Said
from tests.museum.recipes import RECIPES
from tests.museum.score import Scored

PAGE = Path(__file__).resolve().parents[2] / "docs/museum.md"

#: What is asked of a recipe of the tuned half; an empty answer leaves its verdicts open.
Ask = Callable[[Recipe], Sequence[Scored]]

#: Stands for the verdict and the exit codes of a recipe that was not asked.
NOT_ASKED = "| ? | ? | ? |"

_HEAD = """\
# The museum of incidents

Things that went wrong in public, rebuilt in the small, each with healthy twins that were treated
alike but rightly. The table says what a command sees of each, what it says, and how it ends, by
default and under `--profile release`, which `moegeom check` alone has. **Bold** is the right
answer; codes beside it are true as well, or follow from the same cause. A size that is missed
stays here as missed.

`moegeom explain` ([explain.md](explain.md)) sees what two runs recorded and nothing else; B is
computed by an engine written for this page, with torch. Incidents with a grade (named, wrong
cause, only something is off, missed) are scored, not tuned to one by one; those "kept apart" are
the other half, whose verdicts nobody looks at while moegeom is improved
(`python -m tests.museum.score untouched`). `python -m tests.museum.refresh_museum` writes this
page, and tests keep it true.
"""

_NEUTRAL = (
    "Silent, without and with a baseline of the checkpoint before, in synthetic and in trained "
    "models (a shift and a factor for softmax scores only)"
)

_COLUMNS = "| incident | what was done | needs | command | verdict | exit | exit, release |"


def render(ask: Ask) -> str:
    """The page; ``ask`` answers the recipes of the tuned half."""
    table = [_COLUMNS, "|---" * 7 + "|", *_rows(ask)]
    neutral = "; ".join(neutral.text for neutral in NEUTRAL.values())
    blocks = [
        _HEAD,
        "\n".join(table) + "\n",
        "## What happened\n",
        "\n".join(_stories()) + "\n",
        "## Changes that change no choice\n",
        f"{_NEUTRAL}: {neutral}.\n",
    ]
    return "\n".join(blocks)


def _rows(ask: Ask) -> Iterator[str]:
    for incident in INCIDENTS:
        yield from _named(incident.name, _of_gate(incident))
    for disagreement in DISAGREEMENTS:
        yield from _named(disagreement.name, _of_explain(disagreement))
    for recipe in RECIPES:
        if not recipe.is_shown:
            yield from _named(recipe.name, _of_recipe(recipe, ask))


def _named(name: str, rows: Iterable[str]) -> Iterator[str]:
    """Rows of one incident, the first with its name."""
    for number, row in enumerate(rows):
        yield f"| {'' if number else _title(name)} {row}"


def _title(name: str) -> str:
    return name.replace("_", " ")


def _of_gate(incident: Incident) -> Iterator[str]:
    needs: Needs = "the weights"
    if incident.baseline is not None:
        needs = "the weights, and a baseline of before"
    for size, case in zip(SIZES, incident.sizes, strict=True):
        yield _gate_row(f"{size}: {case.text}", needs, case, _found(incident, case))
    for case in incident.twins:
        said = ", ".join(map(_code, case.says)) or SILENT
        yield _gate_row(f"twin: {case.text}", needs, case, said)


def _gate_row(done: str, needs: Needs, case: Case, said: str) -> str:
    ends = f"{case.exit_code('default')} | {case.exit_code('release')}"
    return f"| {done} | {needs} | check | {said} | {ends} |"


def _found(incident: Incident, case: Case) -> str:
    others = ", ".join(_code(code) for code in case.says if code != incident.code)
    if not incident.is_found(case):
        return f"missed ({incident.code})" + (f"; {others}" if others else "")
    return f"**{_code(incident.code)}**" + (f"; beside it {others}" if others else "")


def _code(code: str) -> str:
    return f"{code}, {JUDGES[code].title}"


def _of_explain(disagreement: Disagreement) -> Iterator[str]:
    for pair in disagreement.pairs:
        yield _explain_row(pair.text, disagreement.needs, pair)
    for pair in disagreement.twins:
        yield _explain_row(f"twin: {pair.text}", disagreement.needs, pair)


def _explain_row(done: str, needs: Needs, pair: Pair) -> str:
    layer = pair.begins.partition("/")[2]
    where = f", from layer {layer} on" if layer else ""
    said = pair.cause if pair.cause in HEALTHY else f"**{pair.cause}**{where}"
    return f"| {done} | {needs} | explain | {said} | {exit_of(pair.cause)} | - |"


def _of_recipe(recipe: Recipe, ask: Ask) -> Iterator[str]:
    planted = [f"{size}: {one.text}" for size, one in zip(SIZES, recipe.sizes, strict=False)]
    planted += [f"twin: {one.text}" for one in recipe.twins]
    answers = ask(recipe) if recipe.half == "tuned" else ()
    for number, done in enumerate(planted):
        said = NOT_ASKED if recipe.half == "tuned" else "| kept apart | | |"
        if answers:
            said = _answer(answers[number])
        yield f"| {done} | {recipe.needs} | {recipe.command} {said}"


def _answer(scored: Scored) -> str:
    words = ", ".join(scored.said.words)
    bold = f"**{words}**" if scored.grade == "named" else words
    return f"| {scored.grade}: {bold} | {_ends(scored.said)} |"


def _ends(said: Said) -> str:
    return f"{said.exit_code} | {'-' if said.release is None else said.release}"


def _stories() -> Iterator[str]:
    recipes = [recipe for recipe in RECIPES if not recipe.is_shown]
    for one in (*INCIDENTS, *DISAGREEMENTS, *recipes):
        threads = ", ".join(f"[{thread}]({_address(thread)})" for thread in one.threads)
        see = f" See {threads}." if threads else ""
        right = f" Planted: {one.planting} Right: {one.answer}" if isinstance(one, Recipe) else ""
        yield f"- **{_title(one.name)}**: {one.story}{right}{see}"


def _address(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
