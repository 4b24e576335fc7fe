"""What a page holds, as a browser reads it."""

from html.parser import HTMLParser

#: Attributes that load or lead somewhere.
ADDRESSES = ("href", "src", "srcset", "xlink:href", "action", "data")


class Page(HTMLParser):
    """Tags, values of attributes by name, cells by row, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text += data

    @property
    def addresses(self) -> list[str]:
        return [value for name in ADDRESSES for value in self.attributes.get(name, ())]

    @property
    def handlers(self) -> list[str]:
        """Attributes that run something."""
        return [name for name in self.attributes if name.startswith("on")]
