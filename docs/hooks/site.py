"""What MkDocs is told of this repository: which files are pages, where links lead, and what may not be broken.

The site has the repository's layout, so that a link that is right there is right here, and MkDocs can check it. What a
page links to comes along: Markdown as a page, a folder as a list of its files, anything else as it is.
"""

from __future__ import annotations

import html
import json
import logging
import posixpath
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import notebook_html
import reference
import whole_numbers
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "[!A]*.md",
    "docs/*.md",
    "docs/*.css",
    "notebooks/*.ipynb",
    "benchmarks/*.md",
]  # not AGENTS.md
LINK = re.compile(r"\]\((?!\w+:|#|<)([^)\s#]+)")  # the path of [text](path#anchor)
NESTED = re.compile(
    r"^(?:  )+(?=- )", re.M
)  # what is before a list's lower levels, two spaces a level
CALL = re.compile(r"<code>(kit(?:\.\w+)+).*?</code>(?!</a>)")
LOADS = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]+)"')
names: dict[str, str] = {}  # kit.evaluate -> where it is defined, which is its anchor
log = logging.getLogger(
    "mkdocs.hooks.site"
)  # below MkDocs' own, so that --strict counts the warnings


def on_config(config: MkDocsConfig) -> None:
    """The navigation lists the rooms in their order."""
    listed = [f"reference/{name}.md" for name in ["index", *reference.rooms(ROOT)]]
    next(part for part in config.nav if "Reference" in part)["Reference"] = listed


@event_priority(100)  # before mkdocs-jupyter, which picks the notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    found = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    waiting = [
        path.relative_to(ROOT).as_posix()
        for pages in PAGES
        for path in sorted(ROOT.glob(pages))
    ]
    for uri in waiting:  # grows by what is linked
        path = ROOT / uri
        if path.is_dir() and not found.get_file_from_path(f"{uri}/index.md"):
            inside = sorted(one.name for one in path.iterdir() if one.is_file())
            lines = ["---", "search: {exclude: true}", "---", f"# {uri}", ""]
            lines += [f"- [{name}]({quote(name)})" for name in inside]
            found.append(File.generated(config, f"{uri}/index.md", content="\n".join(lines)))
            waiting += [f"{uri}/{name}" for name in inside]
        elif path.is_file() and not found.get_file_from_path(uri):
            found.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
            if path.suffix in (".md", ".ipynb"):
                waiting += [
                    target(uri, link) for link in LINK.findall(path.read_text(encoding="utf-8"))
                ]
    pages, called = reference.read(ROOT)
    names.update(called)
    for name, text in pages.items():
        found.append(File.generated(config, f"reference/{name}.md", content=text))
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a folder leads to its list; lists keep their levels, for which Markdown here wants four spaces."""

    def to_list(link: re.Match[str]) -> str:
        listed = files.get_file_from_path(f"{target(page.file.src_uri, link[1])}/index.md")
        return f"{link[0].rstrip('/')}/index.md" if listed else link[0]

    parts = LINK.sub(to_list, markdown).split("```")
    parts[::2] = [
        NESTED.sub(lambda spaces: 2 * spaces[0], text) for text in parts[::2]
    ]  # not in code
    return "```".join(parts)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`kit.evaluate(...)` in the text leads to the reference; a notebook looks like a page; tables break no number."""

    def to_page(link: str) -> str:
        uri = target(page.file.src_uri, link)
        found = files.get_file_from_path(uri) or files.get_file_from_path(f"{uri}/index.md")
        return found.url_relative_to(page.file) if found else link

    def to_reference(call: re.Match[str]) -> str:
        place = names.get(call[1])
        return (
            f'<autoref optional identifier="{place}">{call[0]}</autoref>' if place else call[0]
        )

    if page.file.src_uri.endswith(".ipynb"):
        notebook = Path(page.file.abs_src_path)
        content = notebook_html.in_the_look_of_the_site(
            content,
            to_page,
            folded_cells(notebook),
            alts(notebook),
        )
        title, *others = page.toc.items  # the theme lists what is below the first
        title.children, page.toc.items = title.children + others, [title]
    else:
        content = whole_numbers.kept_whole(content)
    return CALL.sub(to_reference, content)


def on_post_build(config: MkDocsConfig) -> None:
    """What MkDocs does not see: links of notebooks and of the reference, and what asks the network."""
    site = Path(config.site_dir).resolve()
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    ids = {
        path: set(re.findall(r'\s(?:id|name)="([^"]+)"', text)) for path, text in pages.items()
    }
    for path, text in pages.items():
        if notebook_html.NO_ALT in text:
            log.warning(f"{path.relative_to(site)} has a picture without an alt text")
        for tag, link in sorted(set(LOADS.findall(text))):
            parts = urlsplit(html.unescape(link))
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                if tag != "a" and parts.scheme != "data":
                    log.warning(f"{path.relative_to(site)} asks the network for {link}")
            elif not file.is_file() or unquote(parts.fragment) not in {
                "",
                *ids.get(file, [parts.fragment]),
            }:
                log.warning(f"{path.relative_to(site)} has a link that leads nowhere: {link}")


def folded_cells(notebook: Path) -> set[str]:
    """Ids of the cells whose code JupyterLab folds: code that only draws or installs."""
    return {
        cell["id"]
        for cell in cells_of(notebook)
        if cell["metadata"].get("jupyter", {}).get("source_hidden")
    }


def alts(notebook: Path) -> dict[str, str]:
    """Id of a cell -> what one sees on its picture: `alt` in the cell's metadata."""
    return {
        cell["id"]: cell["metadata"]["alt"]
        for cell in cells_of(notebook)
        if "alt" in cell["metadata"]
    }


def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def target(uri: str, link: str) -> str:
    """The file, relative to the repository, that a link in the page `uri` means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(uri), unquote(link)))
