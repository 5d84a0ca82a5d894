"""The site: every page, notebook and public name is in it, and a broken link ends the build."""

import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import griffe
import pytest
import yaml
from test_house import ROOMS
from test_readme import slug

import grpo_kit as kit
from grpo_kit.loop.config import FIELDS, SETUP

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
docstrings, reference, whole_numbers = map(
    importlib.import_module, ("docstrings", "reference", "whole_numbers")
)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
ENTRY = re.compile(r"^::: (\S+)\n    options: \{heading: (\S+),", re.M)


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml without making the objects that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: tag)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


@pytest.fixture(scope="module")
def read():
    return reference.read(ROOT)


@pytest.fixture(scope="module")
def entries(read):
    """What users write -> (room, where it is defined)."""
    found = [(room, *entry) for room, text in read[0].items() for entry in ENTRY.findall(text)]
    return {
        name: (room, path)
        for room, path, name in found
        if name.startswith(("kit.", "grpo_kit."))
    }


def test_every_stored_picture_has_an_alt_text():
    """`alt` in the metadata of its cell; the site puts it on the picture (docs/hooks/notebook_html.py)."""
    pictures, silent = 0, []
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            if any("image/png" in out.get("data", {}) for out in cell.get("outputs", [])):
                pictures += 1
                alt = cell["metadata"].get("alt", "")
                if len(alt.split()) < 8:
                    silent.append((path.stem, cell["id"], alt))
    assert pictures > 100 and not silent, "an alt says what one sees, in eight words or more"


def test_every_picture_of_a_page_has_an_alt_text():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = [alt for page in pages for alt in re.findall(r"!\[(.*?)\]\(", page.read_text())]
    assert len(found) >= 7 and [alt for alt in found if len(alt.split()) < 8] == []


def listed(part=SITE["nav"]):
    """The pages of the navigation, in order."""
    if isinstance(part, str):
        return [part]
    return [
        page
        for one in (part.values() if isinstance(part, dict) else part)
        for page in listed(one)
    ]


def test_every_notebook_and_page_is_listed_in_order():
    found = listed()
    assert found[0] == "README.md"
    assert [name for name in found if name.startswith("notebooks/")] == [
        f"notebooks/{p.name}" for p in NOTEBOOKS
    ]
    documents = [name for name in found if name.startswith("docs/")]
    assert sorted(documents) == sorted(
        f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")
    )
    assert documents[:2] == ["docs/your_csv.md", "docs/features.md"]
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"} <= set(found)


def test_the_build_is_strict_and_asks_no_network():
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
    kinds = {
        "nav": ["omitted_files", "not_found"],
        "links": ["not_found", "anchors", "unrecognized_links"],
    }
    for part, names in kinds.items():
        assert [SITE["validation"][part][name] for name in names] == ["warn"] * len(names)
    assert SITE["theme"]["font"] is False
    (notebooks,) = [one["mkdocs-jupyter"] for one in SITE["plugins"] if "mkdocs-jupyter" in one]
    assert notebooks["execute"] is False  # what is shown is what is committed


def test_rooms_are_listed_with_the_three_first(read):
    pages, _ = read
    rooms = list(pages)[1:]
    assert rooms == list(reference.rooms(ROOT))
    assert rooms[:3] == ["prompts", "rewards", "schedules"]
    assert rooms[3:] == [room for room in ROOMS if room not in (*rooms[:3], "more", "_support")]


def test_every_name_of_the_front_door_has_an_entry_and_comes_first(read, entries):
    pages, names = read
    for name in kit.__all__:
        value = getattr(kit, name)
        assert f"`kit.{name}`" in pages["index"], name
        if inspect.ismodule(value):
            assert value.__name__.removeprefix("grpo_kit.") in pages
        else:
            room, path = entries[f"kit.{name}"]
            assert names[f"kit.{name}"] == path == f"{value.__module__}.{value.__name__}"
            of_page = [written for _, written in ENTRY.findall(pages[room])]
            before = of_page[: of_page.index(f"kit.{name}")]
            assert all(one.removeprefix("kit.") in kit.__all__ for one in before), name


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("more", "_support")])
def test_every_name_that_a_room_exports_has_an_entry(room, entries):
    module = importlib.import_module(f"grpo_kit.{room}")
    for name in getattr(module, "__all__", []):
        assert {f"kit.{room}.{name}", f"grpo_kit.{room}.{name}", f"kit.{name}"} & set(
            entries
        ), name


def test_every_public_function_and_class_has_an_entry_and_no_private_one(read):
    found = [path for text in read[0].values() for path, _ in ENTRY.findall(text)]
    assert len(found) == len(set(found)), "an entry stands twice"
    expected = set()
    for path in (ROOT / "grpo_kit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "commands" in parts or len(parts) == 2 and path.stem not in ROOMS:
            continue  # the front door, the command line
        if any(re.match("_(?!_)", part) for part in parts):
            continue  # no user's
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name[0] != "_"
            ):
                expected.add(f"{module}.{node.name}")
    assert len(expected) > 250
    assert expected <= set(found), f"without an entry: {sorted(expected - set(found))}"
    assert not [name for name in found if name.rpartition(".")[2][0] == "_"]


def test_a_docstring_keeps_its_lines():
    text = """How much better each completion did, in [0, 1].

    rewards: float (B*G,), those of one prompt adjacent; `None` is left out,
    as everywhere. eps: above 0. group_size: G.
    Unanimous groups give zeros, hence no gradient at all, whichever way they are read, so this goes on and on and
    on: it was wrapped.
    Raises ValueError for a size below 1.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3.

         value     as loss
    k1   KL        nothing

    >>> f([1, 0], 2)  # doctest: +SKIP
    [1.0, -1.0]
    """
    assert docstrings.to_markdown(text, ["rewards", "eps", "group_size"]).split("\n\n") == [
        r"How much better each completion did, in \[0, 1\].",
        r"**`rewards`**: float (B\*G,), those of one prompt adjacent; `None` is left out, as everywhere.",
        "**`eps`**: above 0.",
        "**`group_size`**: G.",
        "Unanimous groups give zeros, hence no gradient at all, whichever way they are read, so this goes on and on"
        " and on: it was wrapped.",
        "Raises ValueError for a size below 1.",
        "Source: DeepSeekMath, [arXiv:2402.03300](https://arxiv.org/abs/2402.03300), eq. 3.",
        "````text\n     value     as loss\nk1   KL        nothing\n````",
        "````pycon\n>>> f([1, 0], 2)  # doctest: +SKIP\n[1.0, -1.0]\n````",
    ]


@pytest.mark.parametrize(
    "cell, expected, why",
    [
        ("1e-7", "[1e-7]", "browsers break after a hyphen between a letter and a digit"),
        ("185.3 s", "[185.3 s]", "a unit stays at its number"),
        ("14, 15 %", "14, [15 %]", "a list may break at its commas"),
        ("2,048 x of 9 GiB", "[2,048 x] of [9 GiB]", "thousands are one number"),
        ("0.0, n = 1,319", "0.0, [n = 1,319]", "a number of questions"),
        ("4 shops, 4 s", "4 shops, [4 s]", "a word is no unit"),
        ('<a href="1e-7">1e-7</a>', '<a href="1e-7">[1e-7]</a>', "tags stay as they are"),
        ("n-7, 5 to 6", "n-7, 5 to 6", "nothing to keep"),
    ],
)
def test_numbers_in_tables_are_kept_whole(cell, expected, why):
    inside = expected.replace("[", '<span class="whole">').replace("]", "</span>")
    page = "<p>1e-7</p><table><tr><td>{0}</td><th align='left'>{0}</th></tr></table><p>9 s</p>"
    assert whole_numbers.kept_whole(page.format(cell)) == page.format(inside), why


def test_tables_and_tags_in_a_docstring_are_left_as_they_are():
    text = "Of <think>.\n\n| piece | pays |\n|---|---|\n| a line ``` | 1/4 |\nNever None."
    assert docstrings.to_markdown(text) == (
        "Of \\<think>.\n\n| piece | pays |\n|---|---|\n| a line \\`\\`\\` | 1/4 |\n\nNever None."
    )


def markdown_of(path):
    """What is Markdown in a file: of a notebook its text, and outputs of that kind."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    outputs = [
        out.get("data", {}).get("text/markdown", "")
        for c in cells
        for out in c.get("outputs", [])
    ]
    return "\n\n".join([*text, *map("".join, outputs)])


def anchors(path):
    text = re.sub(r"^```.*?^```", "", markdown_of(path), flags=re.M | re.S)
    return {
        *map(slug, re.findall(r"^#+ (.*)$", text, re.M)),
        *re.findall(r'<a id="([^"]+)">', text),
    }


@pytest.mark.parametrize("page", [*NOTEBOOKS, *RESULTS], ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", markdown_of(page)):
        if re.match(r"https?://", target):
            assert re.fullmatch(r"https?://[\w.-]+(/[^\s<>]*)?", target), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / unquote(path)).resolve() if path else page
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


def test_every_pin_is_exact_and_griffe_is_the_tests():
    lines = [
        line
        for line in (ROOT / "docs" / "requirements.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
    (griffe,) = [line for line in lines if line.startswith("griffelib")]
    assert griffe in (ROOT / "requirements.txt").read_text().splitlines()


class Links(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.targets, self.loaded = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs["id"]} if attrs.get("id") else set()
        if tag == "a" and attrs.get("href"):
            self.targets.append(attrs["href"])
        elif tag in ("img", "script", "iframe", "source") and attrs.get("src"):
            self.loaded.append(attrs["src"])
        elif tag == "link" and attrs.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(attrs["href"])


needs_a_build = pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"),
    reason="installs MkDocs, builds for a minute; KIT_SLOW_TESTS=1 runs it",
)


def make_docs(repository):
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        ["make", "docs"], cwd=repository, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """As on a fresh machine: a copy of the repository, and Python."""
    repository = tmp_path_factory.mktemp("site") / "kit"
    left_out = shutil.ignore_patterns(".venv*", ".git", "runs", "build", "site", "*cache*")
    shutil.copytree(ROOT, repository, ignore=left_out)
    done = make_docs(repository)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return repository


@needs_a_build
def test_make_docs_builds_a_site_that_asks_no_network(built, entries):
    """Every link and picture of the HTML is followed."""
    site = built / "site"
    read = {
        path.resolve(): Links(path) for path in site.rglob("*.html") if path.name != "404.html"
    }
    assert len(read) > len(NOTEBOOKS) + len(ROOMS)
    for path, links in read.items():
        outside = [
            one for one in links.loaded if not one.startswith("data:") and urlsplit(one).netloc
        ]
        assert not outside, f"{path.name} loads {outside}"
        for target in [*links.targets, *links.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert file.is_file(), f"{path.name}: {target}"
            if parts.fragment and file.suffix == ".html":
                assert unquote(parts.fragment) in read[file].ids, f"{path.name}: {target}"
    for name, (room, path) in entries.items():
        assert path in read[(site / "reference" / f"{room}.html").resolve()].ids, name


@needs_a_build
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_shown_with_its_outputs(built, notebook):
    page = (built / "site" / "notebooks" / notebook.name).with_suffix(".html").read_text()
    cells = json.loads(notebook.read_text())["cells"]
    shown = [out.get("data", {}) for cell in cells for out in cell.get("outputs", [])]
    # of the two a page takes the drawing
    drawn = [data for data in shown if "image/svg+xml" in data]
    pictures = [
        "".join(data["image/png"])
        for data in shown
        if "image/png" in data and data not in drawn
    ]
    assert all(one.split("\n")[0] in page for one in pictures)
    assert page.count("<svg") + page.count("image/svg+xml") >= len(drawn)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert page.count('<div class="highlight"><pre><code>') >= len(code)
    hidden = [cell for cell in code if cell["metadata"].get("jupyter", {}).get("source_hidden")]
    assert page.count('<details class="folded">') == len(hidden) > 0, "code that only draws"
    assert len(page) < notebook.stat().st_size + 400_000, "JupyterLab's styles are in it"
    assert "clipboard-copy" not in page and "$$" not in page
    assert "<math" in page or not any("$$" in "".join(cell["source"]) for cell in cells)


@needs_a_build
def test_what_is_broken_ends_the_build(built, tmp_path):
    repository = tmp_path / "kit"
    shutil.copytree(built, repository, symlinks=True, ignore=shutil.ignore_patterns("site"))
    links = (
        "[page](nowhere.md) [heading](results.md#nowhere) [file](../benchmarks/nowhere.json)"
    )
    badge = "![a badge](https://example.org/badge.svg)"
    for page, planted in {
        "docs/loop.md": links,
        "README.md": badge,
        "docs/stray.md": "# Stray",
    }.items():
        with (repository / page).open("a") as file:
            file.write(f"\n\n{planted}\n")
    path = repository / "notebooks" / "00_start_here.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] += ["\n\n[x](99.ipynb) [y](05_train_full.ipynb#nowhere)"]
    path.write_text(json.dumps(notebook))
    done = make_docs(repository)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "strict mode" in said
    warned = "\n".join(line for line in said.splitlines() if not line.startswith("INFO"))
    for broken in (
        "'nowhere.md'", "'results.md#nowhere'", "'../benchmarks/nowhere.json'", "https://example.org/badge.svg",
        "- docs/stray.md", "nowhere: 99.ipynb", "nowhere: 05_train_full.html#nowhere",
    ):  # fmt: skip
        assert broken in warned


def test_fields_of_config_are_read_by_default_and_unit():
    """Not by the private call that makes a field."""
    extension = griffe.load_extensions(docstrings.Docstrings)
    loaded = griffe.load(
        "grpo_kit", search_paths=[str(ROOT)], allow_inspection=False, extensions=extension
    )
    config = loaded["loop.config.Config"]
    defaults = {p.name: str(p.default) for p in config.parameters if p.name != "self"}
    assert set(defaults) == {field.name for field in dataclasses.fields(kit.Config)}
    assert defaults["steps"] == "100" and defaults["loss_options"] == "{}"
    setup = loaded["loop.config.Preset"]
    defaults |= {name: str(setup.members[name].value) for name in SETUP}
    assert defaults["held_out"] == "256" and defaults["task_options"] == "{}"
    for field in FIELDS.values():
        assert "(" not in defaults[field.name], field.name
        row = f"| `{field.name}` | `{defaults[field.name]}` | {docstrings.prose(field.metadata['unit'])} |"
        shown = setup if field.name in SETUP else config
        assert f"{row} {'yes' if field.metadata['changes'] else ''} |" in shown.docstring.value
