"""What a page does in a browser: it picks, sorts, filters and copies, requests nothing, and is whole
without its script. Where no browser is, these tests say that they did not run.
"""

import re

import pytest

from moegeom.document.chart import Axis, Bars, Chart, Heat, Panel
from moegeom.document.model import Command, Document, Gallery, Headline, Note, Table, View
from moegeom.document.render import render
from tests.unit.document.records import scanned_sample

LAYERS = [str(layer) for layer in range(12)]

#: A number for each layer that no order of the layers sorts, one of them missing.
VALUES = [f"{(7 * n) % 12 / 10:.1f} %" if n != 5 else "-" for n in range(12)]


def chart() -> Chart:
    """A map of twelve layers, panels of the first two, and of another one folded away."""
    bars = [Panel(f"layer {n}", Axis(""), Axis(""), [Bars("a", "tokens", [1.0])]) for n in range(3)]
    links = [f"#layer-{layer}" for layer in LAYERS]
    heat = Heat([[float(n), 0.0] for n in range(12)], "load", 0.0, 12.0)
    panel = Panel("", Axis("expert", names=["0", "1"]), Axis("", names=LAYERS, links=links), [heat])
    sentence = "A sentence."
    return Chart("f", "F", sentence, sentence, "alt", [panel, *bars[:2]], [("a", [1])], bars[2:])


def text_of() -> str:
    """A page with one of everything that a script is for."""
    rows = [*zip(LAYERS, VALUES, strict=True), ("median", "0.5 %")]
    looks = [*["plain"] * 12, "dim"]
    anchors = [f"layer-{layer}" for layer in LAYERS]
    table = Table([["layer", "share"]], rows, looks, anchors=anchors)
    blocks = [Headline([("3", "of 4", "good")]), Note("A word: margin.")]
    sections = [
        blocks,
        [Command("next", "moegeom scan 'a  b'")],
        [table],
        [Gallery(lambda: [chart()])],
    ]
    return render(Document("scan", "m", sections, dict), "html", View())


@pytest.fixture
def page(opened):
    return opened(text_of())


def rows(page) -> list[str]:
    """First cells of the rows that can be seen, in their order."""
    cells = page.locator("tbody tr:visible td:first-child")
    return cells.all_inner_texts()


def test_the_picker_shows_one_layer_and_all_again(page):
    picker = page.get_by_label("Show")
    picker.select_option("1")
    assert rows(page) == ["1", "median"]
    assert page.locator(".panels > [data-layer]:visible").count() == 1
    assert page.locator("svg .picked").count() == 1
    assert not page.locator("details").evaluate("fold => fold.open")
    picker.select_option("2")
    assert page.locator("details").evaluate("fold => fold.open")
    picker.select_option("7")
    assert page.locator("figure.bare").count() == 1
    picker.select_option("")
    assert rows(page) == [*LAYERS, "median"]
    assert page.locator("svg .picked, figure.bare").count() == 0


@pytest.mark.parametrize("row", [0, 4, 11])
def test_a_cell_of_a_map_opens_its_layer(page, row):
    cells = page.locator("[data-links]")
    height = cells.bounding_box()["height"] / 12
    cells.click(position={"x": 5, "y": (row + 0.5) * height}, force=True)
    assert rows(page) == [str(row), "median"]
    assert page.url.endswith(f"#layer-{row}")


def test_a_link_to_a_hidden_row_shows_it(page):
    page.get_by_label("Show").select_option("3")
    page.evaluate("location.hash = '#layer-8'")
    page.wait_for_function("document.querySelector('#layer').value === '8'")
    assert rows(page) == ["8", "median"]


def test_a_column_sorts_down_and_up_and_back_and_what_is_missing_stays_last(page):
    button = page.locator("th:nth-child(2) button")
    order = sorted((n for n in range(12) if n != 5), key=lambda n: -((7 * n) % 12))
    button.click()
    assert rows(page) == [*map(str, order), "5", "median"]
    assert page.locator("th:nth-child(2)").get_attribute("aria-sort") == "descending"
    button.click()
    assert rows(page) == [*map(str, order[::-1]), "5", "median"]
    button.click()
    assert rows(page) == [*LAYERS, "median"]


def test_a_filter_keeps_rows_with_all_of_its_words(page):
    page.get_by_label("filter rows").fill("1 0.5 %")
    assert rows(page) == ["11", "median"]
    page.get_by_label("filter rows").fill("")
    assert rows(page) == [*LAYERS, "median"]


def test_a_command_is_copied_as_it_is_typed(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy").click()
    page.get_by_role("button", name="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "moegeom scan 'a  b'"


def test_contents_lead_to_what_is_on_the_page(page):
    links = page.locator("nav a")
    assert links.all_inner_texts() == ["table by layer", "F"]
    targets = [link.get_attribute("href") for link in links.all()]
    assert [page.locator(target).count() for target in targets] == [1, 1]


def test_without_script_everything_is_there_and_on_paper_no_tools(opened):
    def words(page) -> list[str]:
        return page.locator("body").inner_text().split()

    plain, whole = opened(text_of(), java_script_enabled=False), opened(text_of())
    whole.emulate_media(media="print")
    plain.emulate_media(media="print")
    assert words(plain) == words(whole)
    assert rows(plain) == [*LAYERS, "median"]
    assert plain.locator("figure svg").count() == 4


def test_no_script_but_that_of_the_policy_runs(opened):
    text = text_of().replace("</body>", "<script>document.title = 'pwned'</script></body>")
    page = opened(text, is_silent=False)
    assert page.title() == "moegeom scan: m"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_with_every_figure_fits_and_says_and_requests_nothing(opened, width):
    page = opened(scanned_sample().html(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert len(re.findall(r"\d", page.locator(".numbers").inner_text())) >= 3
