"""A page as its tags, attributes and text."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Unclosed or stray tags are faults."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.tags, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        self.faults += [f"unclosed {tag}" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"stray </{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def alone(html):
    """A whole page that fetches nothing and has no handlers."""
    page = Page(html)
    assert page.faults == []
    assert html.startswith("<!doctype html>")
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attrs.get(name) or "#").startswith("#"), (name, attrs[name])
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    return page
