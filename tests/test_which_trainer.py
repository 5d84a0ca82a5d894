"""What the former trainer trained says so beside it: docs/results.md, README, notebooks with older outputs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
FORMER = re.compile(r"2026-11-2[1-6]")  # its days; the loop's own runs of the last one are named below
SAID = "former trainer"
# Measured on weights as they are, or on functions; or by the loop on the last day.
TRAINED_NOTHING = {
    "What real Qwens can do before any training",
    "Verdicts beside a teacher's",
    "How often an untrained model succeeds",
    "A card that has never been met",
}
NO_TRAINING = {"01_prompts_and_prefill", "02_reward_design"}
BY_THE_LOOP = {
    "04_grpo_by_hand",
    "20_more_than_one_card",
}  # what these train was trained on 2026-11-26, by it


def sections():
    """Heading -> text, up to the next heading of any level."""
    parts = re.split(r"^##+ (.*)$", (ROOT / "docs" / "results.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("heading", [h for h, text in sections().items() if FORMER.search(text)])
def test_a_section_of_older_runs_says_who_trained(heading):
    assert (SAID in sections()[heading]) != (heading in TRAINED_NOTHING)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_with_older_outputs_says_who_trained(path):
    words = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    head = next(text for text in words if "**What it takes.**" in text or "**Where these outputs" in text)
    older = FORMER.search(head) and path.stem not in NO_TRAINING | BY_THE_LOOP
    assert bool(older) == (SAID in head), head


def test_the_readme_says_it_beside_each_result_of_the_former_trainer():
    readme = (ROOT / "README.md").read_text()
    results = readme.split("## Four results, with their limits")[1].split("\n## ")[0]
    said = [SAID in one for one in re.split(r"^- ", results, flags=re.M)[1:]]
    assert said == [False, True, True, True]
