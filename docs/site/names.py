"""`kit.evaluate(...)` in the text, and kit.evaluate in code, lead to the reference."""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_NAME = re.compile(r"((?:grpo_)?kit(?:\.\w+)+)")
_CODE = re.compile(r'<span class="n">kit</span>((?:<span class="o">\.</span><span class="n">\w+</span>)+)')


class Names(SphinxPostTransform):
    """Code in the text that begins with a name of the reference becomes a link to it.

    A bare name does too: in the reference one of the same page, elsewhere a class (`ExactAnswer`) of kit.rewards and
    the like, since `GRPOTrainer` may be TRL's.
    """

    default_priority = 900

    def run(self, **options: object) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            target = self._target(literal.astext())
            if target and not isinstance(literal.parent, nodes.reference | nodes.strong):
                page, place = target
                uri = self.app.builder.get_relative_uri(self.env.docname, page) + place
                link = nodes.reference("", "", internal=True, refuri=uri)
                literal.replace_self(link)
                link += literal

    def _target(self, text: str) -> tuple[str, str] | None:
        objects, here = self.env.domains["py"].data["objects"], self.env.docname
        found = []
        if name := _NAME.match(text):
            found = [objects[name[1]]] if name[1] in objects else []
            room = f"reference/{name[1].split('.')[1]}"
            if not found and name[1].count(".") == 1 and room in self.env.found_docs:
                return room, ""
        elif re.fullmatch(r"[A-Za-z]\w+", text):
            of_page = here.startswith("reference/")
            found = [
                entry
                for name, entry in objects.items()
                if name.endswith(f".{text}")
                and not entry.aliased
                and (entry.docname == here if of_page else re.fullmatch(r"kit\.\w+\.[A-Z]\w*", name))
            ]
        return (found[0].docname, f"#{found[0].node_id}") if len(found) == 1 else None


def link_code(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """In highlighted code: the longest kit.a.b that the reference has."""
    objects = app.env.domains["py"].data["objects"]

    def link(match: re.Match[str]) -> str:
        parts = re.findall(r'<span class="o">\.</span><span class="n">\w+</span>', match[0])
        for n in range(len(parts), 0, -1):
            entry = objects.get("kit" + re.sub(r"<[^>]*>", "", "".join(parts[:n])))
            if entry:
                uri = app.builder.get_relative_uri(page, entry.docname) + f"#{entry.node_id}"
                inside = '<span class="n">kit</span>' + "".join(parts[:n])
                return f'<a class="kit-name" href="{uri}">{inside}</a>' + "".join(parts[n:])
        return match[0]

    if "body" in context:
        context["body"] = _CODE.sub(link, context["body"])


def exactly(app: Sphinx, doctree: nodes.document) -> None:
    """Types in signatures are written in full: one that the reference lacks is not to lead to a namesake."""
    for reference in doctree.findall(pending_xref):
        if reference.get("refdomain") == "py":
            reference.attributes.pop("refspecific", None)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Names)
    app.connect("doctree-read", exactly)
    app.connect("html-page-context", link_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
