"""The reference: the front door, and a page for each room. griffe reads the names, mkdocstrings shows them.

Nothing is imported. A room's page has its names at the front door first, then what the room exports, then what else
is public, by file.
"""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from docstrings import prose

FIRST = ["prompts", "rewards", "schedules"]  # as in every list that people read
Member = griffe.Function | griffe.Class | griffe.Attribute


def rooms(root: Path) -> dict[str, str]:
    """Name -> what it is, by the table of docs/architecture.md; the first three first."""
    table = (
        (root / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .replace("](", "](../docs/")
    )
    listed = re.findall(r"^\| `([\w/]+?)/?` \| (.*) \|$", table, re.M)
    about = {name.replace("/", "."): what for name, what in listed if name[0] != "_"}
    return {
        name: about[name] for name in [*FIRST, *(name for name in about if name not in FIRST)]
    }


def read(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Name of a page -> its Markdown; what users write (kit.evaluate) -> where it is defined."""
    kit = griffe.load("grpo_kit", search_paths=[str(root)], allow_inspection=False)
    door = {f"kit.{name}": found(kit, name) for name in exports(kit)}
    names = {name: member.path for name, member in door.items()}
    pages = {"index": door_page(door, rooms(root))}
    placed: set[str] = set()  # what has an entry on an earlier page
    for room in rooms(root):
        prefix = "kit" if kit[room].path in names.values() else "grpo_kit"
        exported = exports(kit[room])
        homes = (
            f"{kit[room].path}.",
            *(("grpo_kit._support.",) if room == "more.doctor" else ()),
        )
        own = {name: path for name, path in names.items() if path.startswith(homes)}
        called = {name: path for name, path in own.items() if path not in placed}
        called |= {
            f"{prefix}.{room}.{one}": path
            for one in exported
            if (path := found(kit[room], one).path) not in {*called.values(), *placed}
        }
        others = [f"{kit[other].path}." for other in rooms(root) if other != room]
        pages[room] = room_page(kit[room], called, {*names.values(), *called.values()}, others)
        names |= called
        placed |= {*called.values()}
    return pages, names


def exports(room: griffe.Module) -> list[str]:
    """A room's `__all__`, in the order of its imports; where lazy() makes it, what is imported for editors."""
    inner = ("lazy", "__version__")  # of the front door's imports
    # kit.rewards and kit.tasks name some that stand in more/, kit.watch the colours.
    origins = (f"{room.path}.", "grpo_kit.more.", "grpo_kit._support.")
    own = [
        name
        for name, path in room.imports.items()
        if path.startswith(origins) and name not in inner
    ]
    return sorted(room.exports, key=list(room.members).index) if room.exports else own


def door_page(door: dict[str, Member | griffe.Module], about: dict[str, str]) -> str:
    names, listed = (
        ["| name | what it is |", "|---|---|"],
        ["| room | what it is |", "|---|---|"],
    )
    for name, member in door.items():
        page = (
            f"({member.path.removeprefix('grpo_kit.')}.md)"
            if member.is_module
            else f"[{member.path}]"
        )
        text = (
            " ".join(member.docstring.value.split("\n\n")[0].split())
            if member.docstring
            else ""
        )
        names.append(f"| [`{name}`]{page} | {prose(text)} |".replace(" | None", " \\| None"))
    listed += [f"| [{room}]({room}.md) | {what} |" for room, what in about.items()]
    opening = "`import grpo_kit as kit`: the names that a notebook calls. Everything else lives in the rooms below."
    return "\n\n".join(
        ["# Reference", opening, "\n".join(names), "## The rooms", "\n".join(listed)]
    )


def room_page(
    room: griffe.Module, called: dict[str, str], elsewhere: set[str], others: list[str]
) -> str:
    """called: what users write -> where it is defined, of this page; elsewhere: all that has an entry already.

    others: the beginnings of the paths of other rooms, some of which lie inside this one.
    """
    text = [
        f"# {room.name}",
        f"::: {room.path}\n    options: {{show_root_heading: false, members: false}}",
    ]
    text += [entry(path, name, 2) for name, path in called.items()]
    within = [other for other in others if other.startswith(f"{room.path}.")]
    files = [file for file in below(room) if not f"{file.path}.".startswith(tuple(within))]
    for file in [room, *files]:
        rest = [
            one for one in file.members.values() if public(one) and one.path not in elsewhere
        ]
        if rest:
            text += [
                f"## {file.path.removeprefix(f'{room.path}.')}",
                *(entry(one.path, one.name, 3) for one in rest),
            ]
    return "\n\n".join(text)


def entry(path: str, name: str, level: int) -> str:
    return f"::: {path}\n    options: {{heading: {name}, toc_label: {name}, heading_level: {level}}}"


def found(module: griffe.Module, name: str) -> Member | griffe.Module:
    """What stands behind a name; of a function that is named as its file (tasks.largest) the function."""
    member = module.members[name]
    member = member.final_target if member.is_alias else member
    return found(member, name) if member.is_module and name in member.members else member


def below(module: griffe.Module) -> list[griffe.Module]:
    """The files that a user may import from."""
    files = [
        one
        for name, one in sorted(module.members.items())
        if not one.is_alias and one.is_module and name[0] != "_"
    ]
    return [file for one in files for file in [one, *below(one)]]


def public(member: griffe.Object | griffe.Alias) -> bool:
    return (
        not member.is_alias
        and (member.is_function or member.is_class)
        and member.name[0] != "_"
    )
