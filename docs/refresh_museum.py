"""Writes the page of the museum: a table of every incident of tests/museum, as exhibits state it.

Tests hold what is stated against what moegeom says; recipes state nothing, and are asked here (two
minutes of a processor, with torch). `make docs` has it written; it is not in the repository.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.generator.scoring import HEALTHY
from tests.museum.gallery import JUDGES, SIZES, Case, Incident
from tests.museum.invariances import NEUTRAL
from tests.museum.questions import SILENT, exit_of
from tests.museum.recipe import Needs, Recipe, Said
from tests.museum.score import DISAGREEMENTS, INCIDENTS, RECIPES, Scored, answered
from tests.museum.two_runs import Disagreement

PAGE = Path(__file__).resolve().with_name("museum.md")

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
(`python -m tests.museum.score untouched`).
"""

_NEUTRAL = (
    "Silent, without and with a baseline of the checkpoint before, in synthetic and in trained "
    "models (a shift and a factor for softmax scores only)"
)

_COLUMNS = "| incident | what was done | needs | command | verdict | exit | exit, release |"


def render(ask: Ask) -> str:
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
        yield from _named(recipe.name, _of_recipe(recipe, ask))


def _named(name: str, rows: Iterable[str]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {'' if number else _title(name)} {row}"


def _title(name: str) -> str:
    return name.replace("_", " ")


def _of_gate(incident: Incident) -> Iterator[str]:
    needs: Needs = "the weights"
    if incident.baseline is not None:
        needs = "the weights, and a baseline of before"
    names = (*SIZES, *["twin"] * len(incident.twins))
    for name, case in zip(names, (*incident.sizes, *incident.twins), strict=True):
        ends = " | ".join(str(incident.exit_code(case, base)) for base in ("default", "release"))
        said = SILENT if name == "twin" else _found(incident, case)
        yield f"| {name}: {case.text} | {needs} | check | {said} | {ends} |"


def _found(incident: Incident, case: Case) -> str:
    others = ", ".join(map(_code, sorted(case.beside)))
    if case.is_missed:
        return f"missed ({incident.code})" + (f"; {others}" if others else "")
    return f"**{_code(incident.code)}**" + (f"; beside it {others}" if others else "")


def _code(code: str) -> str:
    return f"{code}, {JUDGES[code].title}"


def _of_explain(disagreement: Disagreement) -> Iterator[str]:
    for pair in disagreement.built:
        twin = "twin: " if pair in disagreement.twins else ""
        where = "" if pair.begins is None else f", from layer {pair.begins} on"
        said = pair.cause if pair.cause in HEALTHY else f"**{pair.cause}**{where}"
        row = f"| {twin}{pair.text} | {disagreement.needs} | explain | {said}"
        yield f"{row} | {exit_of(pair.cause)} | - |"


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
    for one in (*INCIDENTS, *DISAGREEMENTS, *RECIPES):
        threads = ", ".join(f"[{thread}]({_address(thread)})" for thread in one.threads)
        see = f" See {threads}." if threads else ""
        right = f" Planted: {one.planting} Right: {one.answer}" if isinstance(one, Recipe) else ""
        yield f"- **{_title(one.name)}**: {one.story}{right}{see}"


def _address(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


if __name__ == "__main__":
    PAGE.write_text(render(lambda recipe: list(answered(recipe))), encoding="utf-8")
