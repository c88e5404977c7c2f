"""HTML reports, read back: every element closed in order, the text and the player's data collected."""

import json
import re
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta"}


class Document(HTMLParser):
    """Every element closed in order; the text and the attributes collected."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes
        names = [key for key, _ in attributes]
        assert len(names) == len(set(names)), names
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open and self.open.pop() == name, name

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data


def player_data(text: str) -> dict:
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)
