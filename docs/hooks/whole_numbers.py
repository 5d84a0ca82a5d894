"""Numbers in a page's tables are not broken: a browser does break 1e-7 after the hyphen, and 185.3 s before the s."""

from __future__ import annotations

import re

CELL = re.compile(r"(<t[dh]\b[^>]*>)(.*?)(?=</t[dh]>)", re.S)
NUMBER = re.compile(
    r"\bn = \d[\d,]*\b|\d[\d.,]*(?:e-\d+\b| (?:%|(?:s|ms|min|h|x|MB|GB|GiB)\b))"
)


def kept_whole(content: str) -> str:
    """content: a page's HTML. The class whole is in site.css.

    >>> kept_whole('<td><a href="1e-5">4e-7</a></td>')
    '<td><a href="1e-5"><span class="whole">4e-7</span></a></td>'
    """
    return CELL.sub(lambda cell: cell[1] + _of_words(cell[2]), content)


def _of_words(cell: str) -> str:
    parts = re.split("(<[^>]*>)", cell)  # words, a tag, words, ...
    parts[::2] = [
        NUMBER.sub(r'<span class="whole">\g<0></span>', words) for words in parts[::2]
    ]
    return "".join(parts)
