"""What hosted images have, as lists of versions in tests/hosted: written from the images' public repositories.

`python .ci/hosted_images.py CLONES`, where CLONES is a folder with clones of googlecolab/backend-info,
Kaggle/docker-python, aws/sagemaker-distribution and runpod/containers, each under its own name. Nothing else is asked.
"""

import re
import subprocess
import sys
from pathlib import Path

LISTS = Path(__file__).resolve().parent.parent / "tests" / "hosted"
_CONDA = re.compile(r"/(?:noarch|linux-64)/([^/]+)-([^-]+)-([^-]+)\.(?:conda|tar\.bz2)")
_PYPI_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


class Clone:
    """A clone of owner/name."""

    def __init__(self, clones, repository):
        self.repository, self.path = repository, Path(clones) / repository.split("/")[1]

    def git(self, *arguments):
        return subprocess.run(
            ["git", "-C", str(self.path), *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def show(self, path, commit="HEAD"):
        return self.git("show", f"{commit}:{path}")

    def source(self, path, *, before=None):
        """(commit, "owner/name path commit date") of the last change to the file, at latest on the day `before`."""
        until = [f"--before={before} 23:59"] if before else []
        commit, date = self.git("log", "-1", "--format=%h %as", *until, "--", path).split()
        return commit, f"{self.repository} {path} {commit} {date}"


def pinned(text):
    """{name: version} of the lines name==version; what comes from an address has none."""
    return canonical(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)", text, re.M))


def canonical(pairs):
    """{name: version} with names as PyPI compares them."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def write(name, python, sources, versions):
    lines = [f"# {source}" for source in sources] + [f"# python {python}"]
    lines += [f"{one}=={versions[one]}" for one in sorted(versions)]
    (LISTS / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(name, python, "torch", versions["torch"], len(versions), "packages")


def colab(clones, *, before=None):
    """(python, source, versions) of the GPU runtime, now or on a day."""
    clone = Clone(clones, "googlecolab/backend-info")
    commit, source = clone.source("pip-freeze.gpu.txt", before=before)
    (python,) = re.findall(r"^Python (\S+)", clone.show("os-info-gpu.txt", commit), re.M)
    return python, source, pinned(clone.show("pip-freeze.gpu.txt", commit))


def kaggle(clones):
    """No list is published: the list of the Colab image that it is built on, with what Kaggle pins over it."""
    clone = Clone(clones, "Kaggle/docker-python")
    _, recipe = clone.source("Dockerfile.tmpl")
    day = re.search(r"/runtime:\S+_(\d{4})(\d\d)(\d\d)-", clone.show("Dockerfile.tmpl"))
    python, source, versions = colab(clones, before="-".join(day.groups()))
    _, pins = clone.source("kaggle_requirements.txt")
    over = pinned(clone.show("kaggle_requirements.txt"))
    return python, [recipe, pins, source], versions | over


def sagemaker(clones):
    """The newest release; conda's list, of which Python packages are the ones built for a Python."""
    clone = Clone(clones, "aws/sagemaker-distribution")
    files = [
        path
        for path in clone.git("ls-tree", "-r", "--name-only", "HEAD").split()
        if path.endswith("gpu.env.out")
    ]
    newest = max(
        files, key=lambda path: [int(n) for n in re.findall(r"\d+", path.split("/")[-2])]
    )
    _, source = clone.source(newest)
    found = _CONDA.findall(clone.show(newest))
    (python,) = [version for name, version, _ in found if name == "python"]
    built = [
        (_PYPI_NAMES.get(name, name), version)
        for name, version, build in found
        if "py" in build
    ]
    return python, source, canonical(pair for pair in built if pair[0] != "python")


def runpod(clones):
    """The template that is built first, and in a comment the other versions of torch that it is built with."""
    clone = Clone(clones, "runpod/containers")
    recipe, base = "official-templates/pytorch/docker-bake.hcl", "official-templates/base/"
    text = clone.show(recipe)
    builds = dict(re.findall(r'"([\d.]+)" = \{\s*(?:torchvision = "([\d.]+)")?', text))
    (first,) = re.findall(
        r'group "dev" \{\s*targets = \["pytorch-ubuntu\d+-cu\d+-torch(\d+)"\]', text
    )
    torch = next(version for version in builds if version.replace(".", "") == first)
    (python,) = re.findall(
        r"/usr/bin/python([\d.]+) /usr/local/bin/python", clone.show(base + "Dockerfile")
    )
    versions = pinned(clone.show(base + "requirements.txt"))
    versions |= {"torch": torch, "torchvision": builds[torch], "torchaudio": torch}
    sources = [
        clone.source(path)[1]
        for path in (recipe, base + "requirements.txt", base + "Dockerfile")
    ]
    return (
        python,
        [*sources, "also built with torch " + " ".join(v for v in builds if v != torch)],
        versions,
    )


if __name__ == "__main__":
    python, source, versions = colab(sys.argv[1])
    write("colab", python, [source], versions)
    write("kaggle", *kaggle(sys.argv[1]))
    python, source, versions = sagemaker(sys.argv[1])
    write("sagemaker", python, [source], versions)
    write("runpod", *runpod(sys.argv[1]))
