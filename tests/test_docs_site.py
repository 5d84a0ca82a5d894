"""The site's sources: every public name and every page is in it, docstrings keep their lines, links lead somewhere."""

import ast
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

import pytest
from test_house import ROOMS
from test_readme import slug

import grpo_kit as kit

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
docstrings, pages, reference = map(importlib.import_module, ("docstrings", "pages", "reference"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
ENTRY = re.compile(r"^:+\{py:\w+\} ([\w.]+)(?:\((.*)\))?", re.M)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    into = tmp_path_factory.mktemp("site") / "sources"
    pages.lay(ROOT, into)
    return into


@pytest.fixture(scope="module")
def entries(tree):
    """name -> parameters, of every page of the reference."""
    text = "\n".join(path.read_text() for path in sorted((tree / "reference").glob("*.md")))
    return dict(ENTRY.findall(text))


def listed(tree):
    """The pages that the front page lists, in order."""
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (tree / "index.md").read_text(), re.S)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]


def test_every_notebook_and_page_is_listed_in_order(tree):
    found = listed(tree)
    assert [name for name in found if name.startswith("notebooks/")] == [
        f"notebooks/{p.stem}" for p in NOTEBOOKS
    ]
    documents = [name for name in found if name.startswith("docs/")]
    assert sorted(documents) == sorted(f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md"))
    assert documents[:2] == ["docs/features", "docs/results"]
    assert {"CHANGELOG", "CONTRIBUTING", "benchmarks/README", "reference/index"} <= set(found)
    for name in found:
        assert (tree / f"{name}.md").exists() or (tree / f"{name}.ipynb").exists()


def test_rooms_are_listed_with_the_three_first(tree):
    block = (tree / "reference" / "index.md").read_text().split("```{toctree}")[1]
    rooms = re.findall(r"^\w+$", block, re.M)
    assert rooms[:3] == ["prompts", "rewards", "schedules"]
    assert rooms[3:] == [room for room in ROOMS if room not in rooms[:3]]


def test_every_name_of_the_front_door_has_an_entry(tree, entries):
    door = (tree / "reference" / "index.md").read_text()
    for name in kit.__all__:
        assert f"`kit.{name}`" in door, name
        if inspect.ismodule(getattr(kit, name)):
            assert (tree / "reference" / f"{name}.md").exists()
        else:
            assert f"kit.{name}" in entries


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_that_a_room_exports_has_an_entry(room, entries):
    module = importlib.import_module(f"grpo_kit.{room}")
    for name in getattr(module, "__all__", []):
        assert {f"kit.{room}.{name}", f"grpo_kit.{room}.{name}", f"kit.{name}"} & set(entries), name


def test_every_public_function_and_class_has_an_entry_and_no_private_one(tree):
    text = "\n".join(path.read_text() for path in (tree / "reference").glob("*.md"))
    found = set(re.findall(r"^:canonical: (\S+)$", text, re.M))
    expected = set()
    for path in (ROOT / "grpo_kit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) == 2 and path.stem not in ROOMS:
            continue  # the front door, the command line
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name[0] != "_"
            ):
                expected.add(f"{module}.{node.name}")
    assert len(expected) > 500
    assert expected <= found, f"without an entry: {sorted(expected - found)}"
    assert not [name for name in found if "._" in name]


def test_parameters_are_those_of_the_signature(entries):
    for name in kit.__all__:
        value = getattr(kit, name)
        if inspect.ismodule(value):
            continue
        shown = ast.parse(f"def f({entries[f'kit.{name}']}): ...").body[0].args
        read = [*shown.posonlyargs, *shown.args, *([shown.vararg] if shown.vararg else []), *shown.kwonlyargs]
        names = [one.arg for one in [*read, *([shown.kwarg] if shown.kwarg else [])]]
        if not (inspect.isclass(value) and issubclass(value, BaseException)):
            assert names == list(inspect.signature(value).parameters), name


def test_a_docstring_keeps_its_lines():
    text = """How much better each completion did, in [0, 1].

    rewards: float (B*G,), those of one prompt adjacent; `None` is left out,
    as everywhere. eps: above 0. group_size: G.
    dtype of the result; None means float32.
    Unanimous groups give zeros, hence no gradient at all, whichever way they are read, so this goes on and on and
    on: it was wrapped.
    Raises ValueError for a size below 1.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3.

         value     as loss
    k1   KL        nothing

    >>> f([1, 0], 2)  # doctest: +SKIP
    [1.0, -1.0]
    """
    assert docstrings.to_markdown(text, ["rewards", "eps", "group_size", "dtype"]).split("\n\n") == [
        r"How much better each completion did, in \[0, 1\].",
        r"**`rewards`**: float (B\*G,), those of one prompt adjacent; `None` is left out, as everywhere.",
        "**`eps`**: above 0.",
        "**`group_size`**: G.",
        "**`dtype`** of the result; None means float32.",
        "Unanimous groups give zeros, hence no gradient at all, whichever way they are read, so this goes on and on"
        " and on: it was wrapped.",
        "Raises ValueError for a size below 1.",
        "Source: DeepSeekMath, [arXiv:2402.03300](https://arxiv.org/abs/2402.03300), eq. 3.",
        "```text\n     value     as loss\nk1   KL        nothing\n```",
        "```pycon\n>>> f([1, 0], 2)  # doctest: +SKIP\n[1.0, -1.0]\n```",
    ]


def test_tables_and_tags_in_a_docstring_are_left_as_they_are():
    text = "Of <think>.\n\n| piece | pays |\n|---|---|\n| a line ``` | 1/4 |\nNever None."
    assert docstrings.to_markdown(text) == (
        "Of \\<think\\>.\n\n| piece | pays |\n|---|---|\n| a line \\`\\`\\` | 1/4 |\n\nNever None."
    )


def test_a_notebook_keeps_its_outputs_and_has_one_title(tree):
    for path in NOTEBOOKS:
        before, after = (json.loads(file.read_text()) for file in (path, tree / "notebooks" / path.name))
        assert len(before["cells"]) == len(after["cells"])
        for one, other in zip(before["cells"], after["cells"], strict=True):
            shown = [out for out in one.get("outputs", []) if out.get("data", True)]
            assert len(shown) == len(other.get("outputs", []))
            for out, copy in zip(shown, other.get("outputs", []), strict=True):
                for kind, value in out.get("data", out).items():
                    ends = {"text/html": "[#\"']", "text/markdown": "[#)]"}.get(kind)
                    value = re.sub(rf"\.ipynb(?={ends})", ".html", "".join(value)) if ends else value
                    assert copy.get("data", copy)[kind] == value
        text = "\n".join(c["source"] for c in after["cells"] if c["cell_type"] == "markdown")
        assert len(re.findall(r"^# ", text, re.M)) == 1, path.name


@pytest.mark.parametrize(
    ("text", "error"),
    [("[x](nowhere.md)", "nowhere.md"), ("[x](../../etc/passwd)", "etc/passwd"), ("![x](no.png)", "no.png")],
)
def test_a_link_to_nowhere_is_refused(text, error, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# A\n\n{text}")
    with pytest.raises(ValueError, match=f"docs/a.md: the link .*{error}"):
        pages.Tree(tmp_path, tmp_path / "out").add("docs/a.md")


def test_links_lead_to_pages(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.json").write_text("{}")
    (tmp_path / "README.md").write_text(
        "# Home\n\n[d](data) [a](docs/a.md#b) ![badge](https://example.org/b.svg)"
    )
    text = "# A\n\n## B\n\n[home](../README.md) [x](../data/x.json)\n\n```\n[code](stays.md)\n```\n"
    (tmp_path / "docs" / "a.md").write_text(text)
    tree = pages.Tree(tmp_path, tmp_path / "out")
    tree.known = {"README.md", "docs/a.md"}
    tree.add("README.md")
    assert (tree.into / "index.md").read_text() == "# Home\n\n[d](data/index.md) [a](docs/a.md#b) badge"
    assert (tree.into / "docs" / "a.md").read_text() == text.replace("../README.md", "../index.md")
    assert "[x.json](<x.json>)" in (tree.into / "data" / "index.md").read_text()
    assert (tree.into / "data" / "x.json").read_text() == "{}"


def markdown_of(path):
    """What is Markdown in a file: of a notebook its text, and outputs of that kind."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    outputs = [out.get("data", {}).get("text/markdown", "") for c in cells for out in c.get("outputs", [])]
    return "\n\n".join([*text, *map("".join, outputs)])


def anchors(path):
    text = re.sub(r"^```.*?^```", "", markdown_of(path), flags=re.M | re.S)
    return {*map(slug, re.findall(r"^#+ (.*)$", text, re.M)), *re.findall(r'<a id="([^"]+)">', text)}


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


def test_links_in_what_a_cell_shows_lead_to_pages(tree):
    shown = (tree / "notebooks" / "10_preferences_then_grpo.ipynb").read_text()
    outputs = [str(cell.get("outputs")) for cell in json.loads(shown)["cells"]]
    assert any("](07_warm_start.html)" in output for output in outputs)
    assert not any(re.search(r"href=[^>]*\.ipynb|\]\([\w./-]+\.ipynb", output) for output in outputs)


def test_links_of_the_reference_lead_to_pages(tree):
    for path in (tree / "reference").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_pin_is_exact_and_griffe_is_the_tests():
    lines = [line for line in (ROOT / "docs" / "requirements.txt").read_text().splitlines() if line[0] != "#"]
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


@pytest.mark.skipif(
    not os.environ.get("KIT_SLOW_TESTS"),
    reason="installs Sphinx, builds for a minute; KIT_SLOW_TESTS=1 runs it",
)
def test_make_docs_builds_a_site_that_asks_no_network(tmp_path):
    """As on a fresh machine: a copy of the repository, and Python. Every link and picture of the HTML is followed."""
    left_out = shutil.ignore_patterns(".venv*", ".git", "runs", "build", "*cache*")
    shutil.copytree(ROOT, tmp_path / "kit", ignore=left_out)
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["make", "docs"], cwd=tmp_path / "kit", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    site = tmp_path / "kit" / "site"
    read = {path.resolve(): Links(path) for path in site.rglob("*.html")}
    assert len(read) > len(NOTEBOOKS) + 2 * len(ROOMS)
    for path, links in read.items():
        outside = [one for one in links.loaded if not one.startswith("data:") and urlsplit(one).netloc]
        assert not outside, f"{path.name} loads {outside}"
        for target in [*links.targets, *links.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert file.exists(), f"{path.name}: {target}"
            if parts.fragment and file.suffix == ".html":
                assert unquote(parts.fragment) in read[file].ids, f"{path.name}: {target}"
    assert '"GRPOTrainer"' in (site / "searchindex.js").read_text()
