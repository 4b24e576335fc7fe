"""What code and pages cite exists: sections of docs/theory.md, works, pages, paths and formulas;
and the sizes of samples that prose states are those that the code takes.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from moegeom.core.tokens import TILE
from moegeom.engine.plan import SMALL_SAMPLE_TOKENS
from moegeom.engine.trust import FIRST_TOKENS
from moegeom.kernels.reductions.samples import NUM_INPUTS
from moegeom.measure.passes import _TYPICAL_TOKENS, FLIPPED, SAMPLED
from moegeom.metrics import METRICS
from tests.architecture.sources import ROOT

FOLDERS = ("moegeom", "cli", "docs", "tests", "benchmarks")
TOP = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
    *("SECURITY.md", "action.yml", "Containerfile", "requirements-check.txt"),
)
TEXTS = {".py", ".md", ".toml", ".bib", ".cu", ".cuh", ".yml"}

THEORY = (ROOT / "docs/theory.md").read_text("utf-8")
REFERENCES = (ROOT / "docs/references.bib").read_text("utf-8")


@cache
def files() -> list[Path]:
    found = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))]
    return [ROOT / name for name in TOP] + [f for f in found if f.suffix in TEXTS and f.is_file()]


#: A string as it is written, and one with those that go on with it.
STRING = r"""(?:"{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
TEXT = rf"\w{{0,2}}(?P<text>{STRING}(?:\s+\w{{0,2}}{STRING})*)"
PIECE = re.compile(
    rf'#[: ]*(?P<comment>[^\n]*)|(?P<doc>^ *(?=r?"""))?{TEXT}', re.DOTALL | re.MULTILINE
)


def said_in_python(source: str, with_strings: bool) -> str:
    """Comments and docstrings, and all other text if wanted, each piece in a line of its own.

    By a pattern: to parse all files takes ten times as long.
    """
    pieces = list(PIECE.finditer(source))
    texts = [piece["text"] for piece in pieces if with_strings or piece["doc"] is not None]
    # a comment may go over several lines, and so may a string
    comments = " ".join(filter(None, (piece["comment"] for piece in pieces)))
    return "\n\n".join([comments, *(re.sub(r"""["']\s+\w{0,2}["']""", "", t) for t in texts if t)])


@cache
def said(file: Path) -> str:
    """What a file says to its reader, paragraphs in one line; the data of tests are not that."""
    text = file.read_text("utf-8")
    if file.suffix == ".py":
        text = said_in_python(text, file.relative_to(ROOT).parts[0] in ("moegeom", "cli"))
    elif file.suffix in (".cu", ".cuh"):
        text = text.replace("\n// ", "\n")
    return re.sub(r"(?<!\n)\n(?!\n) *", " ", text)


def citing(pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for file in files():
        for match in re.finditer(pattern, said(file)):
            yield file, match


def named(missing: list[tuple[Path, str]]) -> list[str]:
    return sorted({f"{file.relative_to(ROOT)}: {what}" for file, what in missing})


# ------------------------------------------------------------------------------- sections of theory
LABEL = r"(?:[A-G]\d{1,2}b?|0)(?!\w|\.\d)"
LABELS = rf"{LABEL}(?: \([a-z]+\))?(?:(?:, | and ){LABEL}(?: \([a-z]+\))?)*"
SECTION = rf"theory\.md\)?,? ({LABELS})"
HEADINGS = set(re.findall(r"^## (\w+) ", THEORY, re.MULTILINE)) - {"Papers", "Errata"}


def cited_sections() -> list[tuple[Path, str]]:
    return [
        (file, label)
        for file, match in citing(SECTION)
        if file.suffix != ".bib"
        for label in re.findall(LABEL, match[1])
    ]


def test_every_cited_section_of_the_theory_is_a_heading_of_that_page():
    cited = cited_sections()
    assert len(cited) > 200, "the pattern no longer finds citations"
    assert named([entry for entry in cited if entry[1] not in HEADINGS]) == []


def test_a_citation_of_the_theory_names_a_section():
    """But for links to the page as a whole."""
    bare = rf"(?<!\[)(?<!\()(?:docs/)?theory\.md(?!\]\(|\)?,? {LABEL}|`)"
    cited = [(f, m[0]) for f, m in citing(bare) if f.suffix != ".bib"]
    assert [entry for entry in named(cited) if not entry.startswith("tests/")] == []


def test_no_section_of_the_theory_is_cited_by_nobody():
    assert sorted(HEADINGS - {label for _, label in cited_sections()}) == []


def test_every_section_of_the_theory_says_where_it_is_used():
    sections = re.split(r"^## ", THEORY, flags=re.MULTILINE)[1:]
    silent = [s.split()[0] for s in sections if s.split()[0] in HEADINGS and "\nUsed by " not in s]
    assert silent == []


def test_every_erratum_that_is_cited_is_listed():
    listed = set(re.findall(r"^- \*\*(F-\d\d)\*\*", THEORY, re.MULTILINE))
    assert named([(f, m[0]) for f, m in citing(r"\bF-\d\d\b") if m[0] not in listed]) == []


def test_every_paper_that_is_cited_by_a_letter_is_listed_and_in_the_bibliography():
    listed = set(re.findall(r"^- \*\*(S\d)\*\*", THEORY, re.MULTILINE))
    cited = r"\b(S\d) (?:Definition|Theorem|Proposition|Remark|Lemma|A\.\d|section|appendix)"
    assert named([(f, m[0]) for f, m in citing(cited) if m[1] not in listed]) == []
    assert listed - ENTRIES.keys() == set()


# -------------------------------------------------------------------------------------------- works
ENTRIES = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", REFERENCES, re.MULTILINE | re.DOTALL))
MONTHS = r"January|February|March|April|May|June|July|August|September|October|November|December"
NAME = r"(?:Mac)?[A-Z][a-zé]+"
AUTHORS = rf"({NAME})(?:(?:, | and | & ){NAME})*(?: et al\.)?"
TITLED = rf"{AUTHORS}(?:,(?: [A-Z]\w+)+,| and {NAME},[^.]*,)?"
YEAR = r"\(?((?:18|19|20)\d\d)\b(?![-\d])"


def field(key: str, name: str) -> str:
    match = re.search(rf"^  {name} = \{{(.*)\}},$", ENTRIES[key], re.MULTILINE)
    return match[1] if match else ""


def first_author(key: str) -> str:
    return field(key, "author").split(",")[0]


def test_keys_are_named_after_first_author_and_year_and_stand_in_order():
    own = [key for key in ENTRIES if not re.fullmatch(r"S\d", key)]
    assert [k for k in own if k != first_author(k).replace(" ", "") + field(k, "year")] == []
    ordered = [key for key in own if key != "TranHuu2026"]
    assert ordered == sorted(ordered, key=str.lower)
    assert [key for key in ENTRIES if not field(key, "title")] == []


def test_every_arxiv_number_is_that_of_an_entry():
    known = {field(key, "eprint") for key in ENTRIES}
    cited = [(f, m[1]) for f, m in citing(r"arXiv[: ]\s*(\d{4}\.\d{4,5})")]
    assert len(cited) > 5, "the pattern no longer finds citations"
    assert named([entry for entry in cited if entry[1] not in known]) == []


def works() -> list[tuple[Path, str]]:
    """Author and year as keys of the bibliography."""
    return [
        (file, match[1] + match[2])
        for file, match in citing(rf"\b{TITLED} {YEAR}")
        if not re.fullmatch(MONTHS, match[1]) and file.suffix != ".bib"
    ]


def test_every_work_that_is_cited_by_author_and_year_is_in_the_bibliography():
    cited = works()
    assert len(cited) > 30, "the pattern no longer finds citations"
    assert named([entry for entry in cited if entry[1] not in ENTRIES]) == []


def test_every_author_after_the_word_source_is_in_the_bibliography():
    authors = {first_author(key) for key in ENTRIES}
    cited = citing(rf"Source: ({NAME})(?:, {NAME})*(?: and | & | et al|, \")")
    assert named([(f, m[1]) for f, m in cited if m[1] not in authors]) == []


def test_no_entry_of_the_bibliography_is_cited_by_nobody():
    text = "\n".join(said(file) for file in files() if file.suffix != ".bib")
    authors = "|".join({first_author(key) for key in ENTRIES})
    cited = {*re.findall(rf"\b(?:{authors})\b", text), *re.findall(r"\*\*(S\d)\*\*", text)}
    assert [key for key in ENTRIES if not cited & {first_author(key), key}] == []


# ---------------------------------------------------------------------------------- pages and paths
#: Pages that a user or a program writes.
WRITTEN = {"report.md", "summary.md"}

#: Endings of files that look like modules: moegeom.toml.
NO_MODULES = ("toml", "xml", "json", "html", "md")


def exists(name: str, file: Path) -> bool:
    """From the root, from where it is cited, or as the end of a path of the project."""
    if (ROOT / name).exists() or (file.parent / name).exists():
        return True
    return "/" not in name and any(f.name == name for f in files())


def test_every_page_that_is_named_exists():
    pages = citing(r"(?<![\w/.*{<:-])((?:\.\./)*(?:[\w-]+/)*[\w-]+\.(?:md|bib))\b")
    missing = [
        (f, m[1]) for f, m in pages if m[1] not in WRITTEN and not exists(m[1].rstrip("."), f)
    ]
    assert named(missing) == []


def test_every_path_into_the_project_exists():
    """Of a path with a placeholder, the part in front of it."""
    roots = "moegeom|cli|docs|tests|benchmarks|sample_ckpts"
    paths = citing(rf"(?<![\w/.:@-])((?:{roots})/[\w./-]*)([*<{{]?)")
    missing = []
    for file, match in paths:
        path = match[1].rstrip(".-")
        path = path.rpartition("/")[0] if match[2] else path
        if not (ROOT / path).exists():
            missing.append((file, match[1]))
    assert named(missing) == []


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def links() -> Iterator[tuple[Path, str]]:
    for page in files():
        if page.suffix == ".md":
            text = page.read_text("utf-8")
            text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if not re.match(r"[a-z]+:", target):
                    yield page, target


@cache
def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)}


def is_dead(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    there = page.parent / path if path else page
    if there.suffix == ".md" and anchor and there.exists():
        return anchor not in anchors(there)
    return not there.exists()


def test_every_link_of_a_page_leads_somewhere():
    found = list(links())
    assert len(found) > 200, "the pattern no longer finds links"
    assert named([link for link in found if is_dead(*link)]) == []


def test_nothing_outside_the_project_is_cited():
    """Notes that users do not have: they were cited once, in a hundred places."""
    outside = r"(?<![\w/])\.\./shared\b|\b(?:THEORY|CELLS|DESIGN|NEEDS|FRICTIONS|HOUSE|STYLE|USERS)(?:\.md| [A-G]\d)"
    assert named([(file, match[0]) for file, match in citing(outside)]) == []


def test_every_path_that_contributing_names_exists():
    """Also those that are said from inside the package, such as `kernels/table.py`."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named_paths = re.findall(
        r"`([\w./-]*(?:/|\.(?:py|md|toml|bib))[\w./-]*)(?:<\w+>[\w.]*)?`", text
    )
    assert len(named_paths) > 30, "the pattern no longer finds paths"
    places = (ROOT, ROOT / "moegeom", ROOT / "moegeom/kernels")
    assert [n for n in named_paths if not any((place / n).exists() for place in places)] == []


def is_defined(dotted: str) -> bool:
    """Whether a dotted name is a module of the project, or is defined at the top of one."""
    parts = dotted.split(".")
    start = ROOT if parts[0] == "moegeom" else ROOT / "cli"
    for length in range(len(parts), 0, -1):
        place = start.joinpath(*parts[:length])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            rest = parts[length:]
            source = file.read_text("utf-8")
            return not rest or re.search(rf"\b{rest[0]}\b", source) is not None
    return False


def test_every_dotted_name_of_the_project_is_defined():
    dotted = r"(?<![\w./-])(moegeom(?:_cli)?(?:\.[A-Za-z_]\w*)+)(?![\w/-])"
    found = [
        (file, match[1]) for file, match in citing(dotted) if not match[1].endswith(NO_MODULES)
    ]
    assert len(found) > 100, "the pattern no longer finds names"
    assert named([entry for entry in found if not is_defined(entry[1])]) == []


FORMULAS = (Path(__file__).resolve().parents[2] / "docs/formulas.md").read_text("utf-8")
KEYS = dict(re.findall(r"^### `(\w+)`\n(.+)$", FORMULAS, re.MULTILINE))
USED = sorted(
    {
        column.formula
        for metric in METRICS.all()
        for table in metric.columns
        for column in metric.columns[table]
        if column.formula
    }
)


def test_every_formula_has_an_entry_and_no_entry_is_left_over():
    assert sorted(KEYS) == USED


def test_an_entry_is_more_than_a_name():
    thin = [key for key, text in KEYS.items() if len(text) <= 60 or not text.endswith(".")]
    assert thin == []


def test_no_key_is_described_twice():
    assert len(re.findall(r"^### `", FORMULAS, re.MULTILINE)) == len(KEYS)


DOCS = Path(__file__).parents[2] / "docs"

#: "a sample of at most 4096 tokens", "about 2048 tokens", "at most 4096 documents".
STATED = re.compile(
    r"(?:at most|about) ([\d,]{4,})\.?(?: (documents))?(?! (?:bytes|boundaries|vertices))"
)

#: What a sample of a few thousand can be, by what its metric needs; pages of no metric: any.
ALL = {SMALL_SAMPLE_TOKENS, NUM_INPUTS, SAMPLED}


def stated(text: str) -> set[int]:
    """Numbers of tokens or documents that sentences about samples state."""
    found = set()
    for sentence in re.split(r"(?<=[.;])\s", re.sub(r"\s+", " ", text)):
        if re.search(r"\bsample|\bSampled|documents\b", sentence):
            found |= {int(n.replace(",", "")) for n, _ in STATED.findall(sentence)}
    return found


def size_of(metric) -> set[int]:
    """The sizes that a metric may state."""
    if "input_sample" in metric.needs:
        return {NUM_INPUTS}
    if {"jumps", "flip_jumps"} & set(metric.needs):
        return {SAMPLED, FLIPPED}
    return {SMALL_SAMPLE_TOKENS}


def texts_of(name: str) -> list[str]:
    """What a metric says of itself: its docstring, which is its page, and its columns."""
    metric = METRICS[name]
    columns = [column.text for table in metric.columns.values() for column in table]
    return [metric.page, metric.text, *columns]


def test_every_metric_states_the_size_of_its_own_sample() -> None:
    wrong = {
        (name, text): stated(text)
        for name in METRICS.names()
        for text in texts_of(name)
        if not stated(text) <= size_of(METRICS[name])
    }
    assert wrong == {}


def test_the_formulas_state_the_size_of_the_metric_that_uses_them() -> None:
    sections = re.split(r"^### `(\w+)`$", (DOCS / "formulas.md").read_text("utf-8"), flags=re.M)
    text_of = dict(zip(sections[1::2], sections[2::2], strict=True))
    seen = 0
    for metric in METRICS.all():
        formulas = {c.formula for table in metric.columns.values() for c in table if c.formula}
        for formula in formulas & set(text_of):
            numbers = stated(text_of[formula])
            seen += len(numbers)
            assert numbers <= size_of(metric) | {SMALL_SAMPLE_TOKENS}, (metric.name, formula)
    assert seen >= 5


def test_no_other_size_of_a_sample_stands_on_a_page() -> None:
    found = {page.name: stated(page.read_text("utf-8")) - ALL for page in DOCS.glob("*.md")}
    assert {page: numbers for page, numbers in found.items() if numbers} == {}


def test_pages_that_speak_of_first_tokens_mean_those_of_the_code() -> None:
    results = (DOCS / "results.md").read_text("utf-8")
    assert _TYPICAL_TOKENS == TILE
    assert f"the median of the first {_TYPICAL_TOKENS} tokens" in results
    recordings = (DOCS / "recordings.md").read_text("utf-8")
    assert f"the first {FIRST_TOKENS} tokens of each router" in recordings


def test_a_wrong_number_is_seen() -> None:
    assert stated("Ties, on a sample of at most 8192 tokens, and more.") == {8192}
    assert stated("On a sample of\nabout 2,049 tokens.") == {2049}
    assert stated("Longer than 8192 tokens.") == set()
