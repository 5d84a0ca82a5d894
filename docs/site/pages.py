"""The sources of the site: pages and notebooks of the repository, and the reference, as one tree of Markdown."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import reference

PAGES = ["features", "results", "tasks_and_rewards", "architecture"]  # of docs/, in this order; others follow
PROJECT = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md"]
_LINK = re.compile(
    r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?"
)  # path and anchor of [text](path#anchor), no scheme
_MARK = re.compile(r'<a id=\\?"([\w-]+)\\?"></a>')  # in a notebook's JSON the quotes are escaped
_REMOTE = re.compile(
    r"!\[([^\]]*)\]\(https?://[^)]*\)"
)  # a badge: its words stay, so that no page asks the network
_TO_NOTEBOOK = {  # in what a cell shows, which Sphinx hands on as it is
    "text/html": re.compile(r"""(<a [^>]*href=["'][\w./-]+)\.ipynb(["'#])"""),
    "text/markdown": re.compile(r"(\]\([\w./-]+)\.ipynb([)#])"),
}
_FENCED = re.compile(r"(^ *(```+|~~~+).*?^ *\2[ \t]*$)", re.M | re.S)


def lay(root: Path, into: Path) -> None:
    """Writes the tree anew. Raises ValueError for a link that leads nowhere, naming page and link."""
    shutil.rmtree(into, ignore_errors=True)
    tree = Tree(root, into)
    docs = [f"docs/{path.name}" for path in sorted((root / "docs").glob("*.md"), key=_place)]
    notebooks = [
        f"notebooks/{path.name}" for path in sorted((root / "notebooks").glob("[0-9][0-9]*_*.ipynb"))
    ]
    tree.known = {"README.md", *docs, *notebooks, *PROJECT}
    for page in sorted(tree.known):
        tree.add(page)
    for name, text in reference.pages(root).items():
        tree.write(f"reference/{name}.md", text)
    listed = [("The course", notebooks), ("Documentation", docs), ("Reference", ["reference/index.md"])]
    text = (into / "index.md").read_text()
    for caption, files in [*listed, ("Project", PROJECT)]:
        text += (
            f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
            + "\n".join(map(_document, files))
            + "\n```"
        )
    (into / "index.md").write_text(text + "\n")


def _place(path: Path) -> tuple[int, str]:
    return PAGES.index(path.stem) if path.stem in PAGES else len(PAGES), path.name


def _document(file: str) -> str:
    return "index" if file == "README.md" else str(Path(file).with_suffix(""))


class Tree:
    """known: files that are pages; what they link to besides becomes a page or a file beside them, once."""

    def __init__(self, root: Path, into: Path) -> None:
        self.root, self.into = root, into
        self.known: set[str] = set()
        self.done: set[str] = set()

    def add(self, file: str) -> None:
        if file in self.done:
            return
        self.done.add(file)
        source = self.root / file
        if source.is_dir():
            self.write(f"{file}/index.md", self._listing(file))
        elif source.suffix == ".md":
            orphan = "" if file in self.known else "---\norphan: true\n---\n\n"
            self.write(
                _document(file) + ".md", orphan + self.linked(file, source.read_text(encoding="utf-8"))
            )
        elif source.suffix == ".ipynb":
            self.write(file, json.dumps(self._notebook(file), ensure_ascii=False))
        else:
            (self.into / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.into / file)

    def write(self, file: str, text: str) -> None:
        (self.into / file).parent.mkdir(parents=True, exist_ok=True)
        (self.into / file).write_text(text, encoding="utf-8")

    def linked(self, file: str, text: str) -> str:
        """Its Markdown with links to files turned into links to pages; code is left alone."""
        parts = _FENCED.split(text)
        # split() gives text, fenced block, its fence, text, ...
        kept = [part for n, part in enumerate(parts) if n % 3 != 2]
        kept[::2] = [
            _LINK.sub(lambda match: self._target(file, *match.groups("")), part) for part in kept[::2]
        ]
        kept[::2] = [re.sub(rf"^(?:{_MARK.pattern})+$", _as_labels, part, flags=re.M) for part in kept[::2]]
        kept[::2] = [_REMOTE.sub(r"\1", part) for part in kept[::2]]
        return "".join(kept)

    def _target(self, file: str, link: str, anchor: str) -> str:
        here = Path(file).parent
        target = os.path.normpath(here / unquote(link))
        if target.startswith("..") or not (self.root / target).exists():
            raise ValueError(f"{file}: the link {link} leads to no file of the repository")
        self.add(target)
        if anchor and anchor[1:] in _MARK.findall((self.root / target).read_text(encoding="utf-8")):
            return f"#mark-{anchor[1:]}"  # a label, of which there is one in the whole site
        page = f"{target}/index.md" if (self.root / target).is_dir() else target
        page = "index.md" if page == "README.md" else page
        return os.path.relpath(page, here).replace(" ", "%20") + anchor

    def _listing(self, folder: str) -> str:
        """A page in place of a folder: its files, each to read."""
        text = [f"---\norphan: true\n---\n\n# {folder}", "| file | KiB |\n|---|---|"]
        for path in sorted(path for path in (self.root / folder).iterdir() if not path.name.startswith(".")):
            file = str(path.relative_to(self.root))
            if path.is_dir():
                size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
                text[-1] += f"\n| {path.name}/, a folder | {size / 1024:,.0f} |"
            else:
                self.add(file)
                text[-1] += f"\n| [{path.name}](<{path.name}>) | {path.stat().st_size / 1024:,.0f} |"
        return "\n\n".join(text)

    def _notebook(self, file: str) -> dict:
        """With its outputs as they were committed. One title: later ones are sections."""
        notebook = json.loads((self.root / file).read_text(encoding="utf-8"))
        titled = False
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                source = self.linked(file, "".join(cell["source"]))
                if titled:
                    source = re.sub(r"^# ", "## ", source, flags=re.M)
                titled = titled or source.startswith("# ")
                cell["source"] = source
        for cell in notebook["cells"]:
            if "outputs" in cell:  # without a display that showed nothing in the end
                cell["outputs"] = [out for out in cell["outputs"] if out.get("data", True)]
            for out in cell.get("outputs", []):
                for kind in _TO_NOTEBOOK.keys() & out.get("data", {}).keys():
                    shown = "".join(out["data"][kind])
                    out["data"][kind] = _TO_NOTEBOOK[kind].sub(r"\1.html\2", shown)
        return notebook


def _as_labels(match: re.Match[str]) -> str:
    """Marks above a heading, and labels of it, to which a link may lead from other pages."""
    return "\n".join([match[0], "", *(f"(mark-{mark})=" for mark in _MARK.findall(match[0]))])
