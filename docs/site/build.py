"""Builds the site: `make docs`. Lays its sources out under build/docs/, then runs Sphinx, where a warning is an error.

Every page has one source: README, docs/, notebooks/ and CHANGELOG as they stand in the repository, readable there too,
and docstrings. Here they are copied, with links to a file turned into links to its page.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pages import lay
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]
BUILD, SITE = ROOT / "build" / "docs", ROOT / "site"


def main(*options: str) -> int:
    """A site that is there stays until the new one is whole."""
    shutil.rmtree(BUILD, ignore_errors=True)
    lay(ROOT, BUILD / "sources")
    strict = ["-W", "--keep-going", "-q"]
    folders = ["-c", str(Path(__file__).parent), "-d", str(BUILD / "doctrees"), str(BUILD / "sources")]
    failed = build_main(["-b", "html", *strict, *options, *folders, str(BUILD / "html")])
    if not failed:
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.move(BUILD / "html", SITE)
        print(f"Built: {SITE / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
