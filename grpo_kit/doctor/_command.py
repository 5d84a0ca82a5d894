"""`grpo-kit doctor`: what this machine has, each part of the kit tried on it, and what to do."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from grpo_kit.doctor import _self_check as self_check
from grpo_kit.doctor import _surroundings as surroundings
from grpo_kit.doctor._report import as_data, as_text, line_of, scrubbed
from grpo_kit.record.run_path import path_of


def doctor(
    as_json: Annotated[
        Path | None, Option("--json", help="write the same as data; an existing file is replaced")
    ] = None,
    verbose: Annotated[bool, Option("--verbose", help="show the stack trace of what failed")] = False,
) -> None:
    """What this machine has, a check of every part of the kit on it, and what to do: paste it into a bug report.

    Nothing is left on the disk but --json's file. Each part that is checked is ok, failed or skipped; one that fails
    hides no other. The exit code is 1 where one failed, else 0.
    """
    as_json = as_json and path_of(as_json, "--json")
    if as_json and not as_json.absolute().parent.is_dir():
        raise ValueError(f"--json {as_json}: there is no such folder; name a file in one that is there")
    with tempfile.TemporaryDirectory(prefix="grpo_kit-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        sections, checks = [], []
        for section in surroundings.sections():
            print(as_text(section) + "\n", flush=True)
            sections.append(section)
        print("Self-check", flush=True)
        width = max(map(len, self_check.PARTS))
        for check, trace in self_check.checks(folder):
            print(line_of(check, width), flush=True)
            if verbose and trace:
                print(scrubbed(trace), flush=True)
            checks.append(check)
    to_do = [line for section in sections for line in section.to_do]
    failed = [check.part for check in checks if check.outcome == "failed"]
    if failed:
        hint = "" if verbose else "run it again with --verbose and "
        to_do.append(
            f"{', '.join(failed)} failed: where no line above says why, {hint}open an issue with all of this and the "
            "output of python -m torch.utils.collect_env"
        )
    print("\nWhat to do")
    print("\n".join(f"  - {scrubbed(line)}" for line in to_do) or "  nothing: no trouble was found")
    if as_json:
        data = as_data(sections, checks, to_do)
        as_json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if failed:
        raise Exit(1)
