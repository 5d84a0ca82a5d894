"""A docstring of the kit -> Markdown that keeps its lines.

The kit's docstrings are plain text: a summary, then a line for each argument ("name: meaning", wrapped), "Raises ...",
"Source: ...", tables, doctests. Markdown alone would make one paragraph of all that, and read `a * b` and [0, 1].
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

_FITS = 112  # columns: a line that ends earlier than its next word demands was ended on purpose
_SPECIAL = re.compile(r"([\\*_<>\[\]{}$#|~`])")
_NAMED = re.compile(r"(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*): ")
_OPENS = re.compile(r"(?:Raises|Returns|Sources?)\b")
_COLUMNS = re.compile(r"\S {2,}\S")


def summary(text: str) -> str:
    """The first paragraph, as one line of Markdown."""
    return prose(" ".join(inspect.cleandoc(text).split("\n\n")[0].split()))


def to_markdown(text: str, arguments: Collection[str] = ()) -> str:
    """arguments: names of the signature; each of their lines begins a paragraph of its own, the name in bold."""
    return "\n\n".join(
        part
        for block in re.split(r"\n[ \t]*\n", inspect.cleandoc(text))
        for part in _block(block.splitlines(), arguments)
    )


def prose(line: str) -> str:
    """Text with what Markdown would read as its own taken literally; code in backticks stays code."""
    parts = re.split(r"((?<!`)`[^`]+`(?!`))", line)
    parts[::2] = [_links(_SPECIAL.sub(r"\\\1", part)) for part in parts[::2]]
    return "".join(parts)


def _links(text: str) -> str:
    text = re.sub(r"\barXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"(?<![\w/(.])((?:github\.com|joschu\.net)/[\w./\-]*\w)", r"[\1](https://\1)", text)


def _block(lines: list[str], arguments: Collection[str]) -> list[str]:
    """What stands between two empty lines: an example, a table, columns, or lines of text."""
    for n, line in enumerate(lines):
        if line.lstrip().startswith(">>>"):
            before = _block(lines[:n], arguments) if n else []
            return [*before, _fenced(inspect.cleandoc("\n".join(lines[n:])).splitlines(), "pycon")]
    if lines[0].startswith("|"):
        rows = [n for n, line in enumerate(lines) if line.startswith("|")]
        cells = [prose(line).replace(r"\|", "|") for line in lines[: rows[-1] + 1]]
        rest = lines[rows[-1] + 1 :]
        return ["\n".join(cells), *(_block(rest, arguments) if rest else [])]
    for n, line in enumerate(lines):
        columns = [bool(_COLUMNS.search(one)) or one.startswith("   ") for one in lines[n:]]
        if line.startswith(("    ", "\t")) or (sum(columns) >= 2 and columns[0]):
            before = _block(lines[:n], arguments) if n else []
            return [*before, _fenced(lines[n:], "text")]
    return [_named(prose_of, arguments) for prose_of in _paragraphs(lines, arguments)]


def _fenced(lines: list[str], language: str) -> str:
    fence = "````" if any("```" in line for line in lines) else "```"
    return "\n".join([f"{fence}{language}", *lines, fence])


def _paragraphs(lines: list[str], arguments: Collection[str]) -> list[str]:
    """Wrapped lines joined; one that was begun on purpose begins a paragraph."""
    found: list[str] = []
    last = ""
    for line in lines:
        named = _NAMED.match(line)
        of_signature = named and set(re.findall(r"\w+", named[1])) <= set(arguments)
        early = len(last) + 1 + len(line.split(" ", 1)[0]) <= _FITS
        of_the_last = re.match(r"None (?!if)", line)  # what None means is said of the argument above
        ended = last.endswith((".", ":", ";", ".)")) and (named or (early and not of_the_last))
        if not found or of_signature or ended or _OPENS.match(line):
            found.append(line)
        else:
            found[-1] += " " + line.lstrip()
        last = line
    return [one for paragraph in found for one in _run_in(paragraph, arguments)]


def _run_in(paragraph: str, arguments: Collection[str]) -> list[str]:
    """ "a: this. b: that." -> both, where b is an argument."""
    if not arguments:
        return [paragraph]
    name = "|".join(re.escape(argument) for argument in arguments)
    return re.split(rf"(?<=[.;)]) (?=(?:{name})(?:, (?:{name}))*: )", paragraph)


def _named(paragraph: str, arguments: Collection[str]) -> str:
    """An argument's line with its name as code."""
    match, word = _NAMED.match(paragraph), paragraph.split(" ", 1)[0]
    if word in arguments and word.islower():
        return f"**`{word}`**{prose(paragraph[len(word) :])}"
    if not (arguments and match and (match[1][0] in "_*" or match[1][0].islower() or match[1] in arguments)):
        return prose(paragraph)
    names = ", ".join(f"**`{name}`**" for name in match[1].split(", "))
    return f"{names}: {prose(paragraph[match.end() :])}"
