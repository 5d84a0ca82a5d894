"""The reference: a page of the front door, and one or two for each room, out of signatures and docstrings.

Read as text, never imported: the site is built without torch. A room's page has what its users call: the names that it
exports, those of the front door that live there, and the classes that those give back or raise. What else is public
stands on a second page, by file, for those who read the code.
"""

from __future__ import annotations

from pathlib import Path

import griffe
from docstrings import prose, summary, to_markdown
from rooms import Kit, Member, Room


def pages(root: Path) -> dict[str, str]:
    """Name of the page -> its Markdown. The first is the front door."""
    kit = Kit(root)
    found = {"index": _door_page(kit)}
    for room in kit.rooms:
        title = f"# {room.name}"
        about = to_markdown(room.module.docstring.value)
        more = (
            f"What else is public here, by file: [{room.name}, behind](behind_{room.name}.md)."
            if room.behind
            else ""
        )
        found[room.name] = "\n\n".join(
            [title, about, _table(room.names), more, *_entries(kit, room, room.names)]
        )
        if room.behind:
            title = (
                f"# {room.name}, behind\n\n"
                f"What [{room.name}]({room.name}.md) is made of; it may change without a word."
            )
            found[f"behind_{room.name}"] = "\n\n".join(
                [f"---\norphan: true\n---\n\n{title}", *_entries(kit, room, room.behind)]
            )
    return found


def _door_page(kit: Kit) -> str:
    text = [
        "# Reference",
        "`import grpo_kit as kit`: what a notebook calls. Each name leads to its signature and docstring.",
    ]
    for heading, entries in kit.door:
        text += [f"## {heading}", "| name | what it is |\n|---|---|"]
        for names, comment in entries:
            found = {name: kit.find(path) for name, path in names.items()}
            links = {
                name: f"[`kit.{name}`]({name}.md)" if member.is_module else f"{{py:obj}}`kit.{name}`"
                for name, member in found.items()
            }
            rows = {", ".join(links.values()): prose(comment)}
            if not comment:
                rows = {links[name]: summary(member.docstring.value) for name, member in found.items()}
            text[-1] += "".join(f"\n| {link} | {what} |" for link, what in rows.items())
    text += ["## The rooms", "| room | what it is |\n|---|---|"]
    text[-1] += "".join(f"\n| [{room.name}]({room.name}.md) | {room.about} |" for room in kit.rooms)
    return "\n\n".join([*text, "```{toctree}\n:hidden:\n\n" + "\n".join(r.name for r in kit.rooms) + "\n```"])


def _table(names: dict[str, Member]) -> str:
    rows = ["| name | what it is |", "|---|---|"]
    for name, member in names.items():
        short = name if name.startswith("kit.") else member.name
        about = summary(member.docstring.value) if member.docstring else ""
        rows.append(f"| {{py:obj}}`{short} <{name}>` | {about} |")
    return "\n".join(rows)


def _entries(kit: Kit, room: Room, names: dict[str, Member]) -> list[str]:
    """Signatures and docstrings, under a heading for each file with what the file says of itself."""
    text, file = [], room.module.path
    for name, member in names.items():
        if member.module.path != file:
            file = member.module.path
            text.append(f"## {file.removeprefix('grpo_kit.').removeprefix(room.name + '.')}")
            if member.module.docstring and member.module is not room.module:
                text.append(to_markdown(member.module.docstring.value))
        text.append(_entry(kit, name, member))
    return text


def _entry(kit: Kit, name: str, member: Member, fence: str = "::::::") -> str:
    """One directive of Sphinx's Python domain, with the public methods of a class inside."""
    parameters = member.parameters if member.is_function or member.is_class else []
    shown = [p for p in parameters if p.name not in ("self", "cls")]
    body = to_markdown(member.docstring.value, [p.name for p in shown]) if member.docstring else ""
    kind, options = "function", [] if fence != "::::::" else [f":canonical: {member.canonical_path}"]
    signature = f"{name}({_parameters(kit, shown)})"
    if member.is_class:
        kind = "exception" if name.endswith("Error") else "class"
        for one in members(member):
            body += "\n\n" + _entry(kit, f"{name}.{one.name}", one, fence[:-1])
    elif member.is_attribute:
        kind, signature = ("property" if "property" in member.labels else "data"), name
        options += [f":type: {_written(kit, member.annotation)}"] if member.annotation else []
    else:
        signature += f" -> {_written(kit, member.returns)}" if member.returns else ""
        if fence != "::::::":
            kind = "method"
            options += [
                f":{label}:" for label in ("classmethod", "staticmethod", "async") if label in member.labels
            ]
    return "\n".join([f"{fence}{{py:{kind}}} {signature}", *options, "", body, fence])


def members(member: griffe.Class) -> list[Member]:
    """Public methods and properties with a docstring, those of bases inside the kit too."""
    own = member.members | {n: m.final_target for n, m in member.inherited_members.items()}
    return [
        one
        for name, one in own.items()
        if name[0] != "_"
        and not one.is_alias
        and one.docstring
        and (one.is_function or "property" in one.labels)
    ]


def _parameters(kit: Kit, parameters: list[griffe.Parameter]) -> str:
    """As in the source: the kit's own types by the name that users write, so that they become links."""
    marks = {"variadic positional": "*", "variadic keyword": "**"}
    written, kinds = [], [p.kind.value if p.kind else "" for p in parameters]
    for n, p in enumerate(parameters):
        if kinds[n] == "keyword-only" and not {"keyword-only", "variadic positional"} & set(kinds[:n]):
            written.append("*")
        text = marks.get(kinds[n], "") + p.name
        text += f": {_written(kit, p.annotation)}" if p.annotation else ""
        if p.default is not None and not marks.get(kinds[n]):
            text += f" = {p.default}" if p.annotation else f"={p.default}"
        written.append(text)
        if kinds[n] == "positional-only" and kinds[n + 1 : n + 2] != ["positional-only"]:
            written.append("/")
    return ", ".join(written)


def _written(kit: Kit, annotation: str | griffe.Expr) -> str:
    if isinstance(annotation, str):
        return annotation
    return "".join(
        kit.public.get(part.canonical_path, part.name) if isinstance(part, griffe.ExprName) else str(part)
        for part in annotation.iterate(flat=True)
    )
