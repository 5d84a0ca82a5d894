"""What the kit's front door and rooms have to offer, found by reading them (griffe); nothing is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import griffe

FIRST = ["prompts", "rewards", "schedules"]  # the rest as in docs/architecture.md
Member = griffe.Function | griffe.Class | griffe.Attribute


@dataclass
class Room:
    """names: what users write -> what it is, in the order of the page; behind: the same of the second page."""

    name: str
    about: str
    module: griffe.Module
    names: dict[str, Member] = field(default_factory=dict)
    behind: dict[str, Member] = field(default_factory=dict)


class Kit:
    """The package as it stands in `root`, read."""

    def __init__(self, root: Path) -> None:
        self.module = griffe.load("grpo_kit", search_paths=[str(root)], allow_inspection=False)
        self.door = front_door((root / "grpo_kit" / "__init__.py").read_text())
        table = (root / "docs" / "architecture.md").read_text()
        table = re.sub(r"\]\((?=[\w.-]+\.md)", "](../docs/", table)  # as they are read from reference/
        about = dict(re.findall(r"^\| `(\w+)/?` \| (.*) \|$", table, re.M))
        order = [*FIRST, *(name for name in about if name not in FIRST)]
        self.rooms = [Room(name, about[name], self.module[name]) for name in order]
        self.public: dict[str, str] = {}  # where it is defined -> what users write
        for _, entries in self.door:
            for names, _ in entries:
                self.public |= {self.find(path).canonical_path: f"kit.{name}" for name, path in names.items()}
        for room in self.rooms:
            self._fill(room)

    def find(self, path: str) -> Member | griffe.Module:
        """What stands there; of a function named as its file (tasks.largest) the function, not the file."""
        found = self.module[path.removeprefix("grpo_kit.")]
        found = found.final_target if found.is_alias else found
        while found.is_module and found.name in found.members and found.path.count(".") > 1:
            found = found.members[found.name]
            found = found.final_target if found.is_alias else found
        return found

    def _fill(self, room: Room) -> None:
        prefix = "kit" if f"grpo_kit.{room.name}" in self.public else "grpo_kit"
        exported = {}
        imported = [*room.module.members]
        for one in sorted(room.module.exports or [], key=imported.index):
            member = self.find(f"grpo_kit.{room.name}.{one}")
            exported[member.canonical_path] = f"{prefix}.{room.name}.{one}"
        self.public = exported | self.public
        called = [
            path for path in self.public if path in exported or path.startswith(f"grpo_kit.{room.name}.")
        ]
        everything = {m.canonical_path: m for m in self._defined(room.module, called)}
        chosen = called or list(everything)
        for path in chosen:  # grows: what these give back or raise
            for word in re.findall(r"\w+", mentions(everything[path])):
                chosen += [
                    other
                    for other, member in everything.items()
                    if member.name == word and member.is_class and other not in chosen
                ]
        for path, member in everything.items():
            (room.names if path in chosen else room.behind)[self.public.setdefault(path, path)] = member

    def _defined(self, module: griffe.Module, called: list[str]) -> list[Member]:
        """Public functions and classes of a module and those below it: files with what is called come first."""
        own = [
            member
            for name, member in module.members.items()
            if not (member.is_alias or member.is_module or name.startswith("_"))
            and (member.is_function or member.is_class or member.canonical_path in called)
        ]
        below = [
            one
            for name, one in module.members.items()
            if not one.is_alias and one.is_module and name[0] != "_"
        ]

        def place(file: griffe.Module) -> tuple[int, str]:
            return next(
                (n for n, path in enumerate(called) if path.startswith(f"{file.path}.")), 999
            ), file.name

        return own + [member for file in sorted(below, key=place) for member in self._defined(file, called)]


def front_door(source: str) -> list[tuple[str, list[tuple[dict[str, str], str]]]]:
    """Of grpo_kit/__init__.py: (heading, [({name: where it is defined}, comment)]), in the order of its lines."""
    sections: list[tuple[str, list[tuple[dict[str, str], str]]]] = []
    block = source.split("if TYPE_CHECKING:\n")[1].split("\n__all__")[0]
    for line in block.splitlines():
        if heading := re.match(r"    # (.*)", line):
            sections.append((heading[1].rstrip("."), []))
        elif found := re.match(r"    from (\S+) import ([\w, ]+?)(?:  # (.*))?$", line):
            names = {name: f"{found[1]}.{name}" for name in found[2].split(", ")}
            sections[-1][1].append((names, found[3] or ""))
    return sections


def mentions(member: Member) -> str:
    """Where a class stands that its users meet: what is given back, and what the docstring names."""
    text = (
        str(getattr(member, "returns", "") or "") + " " + (member.docstring.value if member.docstring else "")
    )
    for method in member.members.values() if member.is_class else ():
        if method.is_function and not method.name.startswith("_"):
            text += f" {method.returns}"
    return text
