"""The kit's docstrings as Markdown. They are plain text: a line for each argument, "Raises ...", tables, doctests."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Sequence

import griffe

SPECIAL = re.compile(r"([\\`*_<\[\]])")  # what Markdown would read as its own
FITS = 110  # columns of a full line
COLUMNS = re.compile(r"^\s{3,}|\S {2,}\S")


FIELD = "_number"  # of kit.Config: _number(default, unit, changes=whether it may change while a run trains)


class Docstrings(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: object) -> None:
        """A field of Config is shown by its default; what else it says of itself is kept for the table below."""
        call = attr.value
        if isinstance(call, griffe.ExprCall) and str(call.function) == FIELD:
            default, unit, *changes = map(str, call.arguments)
            attr.extra["docstrings"]["field"] = ast.literal_eval(unit), bool(changes)
            attr.value = "{}" if default == "dict" else default

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            names = [p.name for p in obj.parameters] if obj.is_function or obj.is_class else []
            names += list(obj.members) if obj.is_class else []
            obj.docstring.value = to_markdown(obj.docstring.value, names)
            if obj.is_class and (fields := fields_of(obj)):
                obj.docstring.value += f"\n\n{fields}"


def fields_of(config: griffe.Class) -> str:
    """A table of fields: default, unit, whether a run that trains may change it; "" if there are none."""
    rows = [
        "| field | default | what it counts | may change while it trains |",
        "|---|---|---|---|",
    ]
    for name, attr in config.members.items():
        if found := attr.extra["docstrings"].get("field") if attr.is_attribute else None:
            unit, changes = found
            rows.append(
                f"| `{name}` | `{attr.value}` | {prose(unit)} | {'yes' if changes else ''} |"
            )
    return "\n".join(rows) if len(rows) > 2 else ""


def to_markdown(text: str, names: Sequence[str] = ()) -> str:
    """names: arguments and fields, each of which begins a paragraph where the text says "name: meaning"."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(
        part for block in blocks for part in markdown_of(block.splitlines(), names)
    )


def markdown_of(lines: list[str], names: Sequence[str]) -> list[str]:
    """What stands between two empty lines: words, and from some line on an example, a table or columns."""
    if not lines:
        return []
    for n, line in enumerate(lines):
        if line.startswith("|"):
            rows = list(itertools.takewhile(lambda one: one.startswith("|"), lines[n:]))
            rest = lines[n + len(rows) :]
            table = "\n".join(map(prose, rows))
            return [*markdown_of(lines[:n], names), table, *markdown_of(rest, names)]
        columns = [bool(COLUMNS.search(one)) for one in lines[n : n + 2]]
        if (
            line.lstrip().startswith(">>>")
            or columns == [True, True]
            or line.startswith("    ")
        ):
            language = "pycon" if line.lstrip().startswith(">>>") else "text"
            return [
                *markdown_of(lines[:n], names),
                "\n".join(
                    [f"````{language}", inspect.cleandoc("\n".join(["", *lines[n:]])), "````"]
                ),
            ]
    text = lines[0].strip()
    for last, line in itertools.pairwise(
        lines
    ):  # one that ends before it is full was ended on purpose
        ended = last.endswith((".", ":", ")")) and len(last) + len(line.split(" ")[0]) < FITS
        text += ("\n" if ended else " ") + line.strip()
    named = "|".join(rf"\*{{0,2}}{name}" for name in names) or "(?!)"
    begins = rf"(?:{named})(?:, (?:{named}))*: "
    parts = re.split(rf"\n|(?<=[.:;)]) (?=Raises |Returns |Sources?:? |{begins})", text)
    heads = [re.match(begins, part) for part in parts]
    return [
        f"**`{head[0][:-2]}`**: {prose(part[head.end() :])}" if head else prose(part)
        for head, part in zip(heads, parts, strict=True)
    ]


def prose(text: str) -> str:
    """Taken literally, but for code in backticks and papers, which become links."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
    return re.sub(
        r"\barXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", "".join(parts)
    )
