"""docs/from_rlhf_to_r1.md: what it says of its pictures is what they are drawn from, and it is read in one sitting."""

import json
import re

from benchmarks.result import ROOT
from benchmarks.story_pictures import METHODS, copies, scored_group

PAGE = (ROOT / "docs" / "from_rlhf_to_r1.md").read_text(encoding="utf-8")
ALTS = re.findall(r"!\[([^\]]+)\]\((\w+\.png)\)", PAGE)


def test_the_page_says_what_each_method_holds():
    (text,) = [alt for alt, path in ALTS if path == "who_holds_what.png"]
    held = [copies(models) for _, models, _ in METHODS.values()]
    assert held == [4 + 4 + 1 + 1, 4 + 1, 4 + 1 + 1, 4]
    assert [int(number) for number in re.findall(r"\d+", text)] == held


def test_the_page_and_notebook_04_say_the_rewards_of_the_picture():
    (text,) = [alt for alt, path in ALTS if path == "group_step.png"]
    _, texts, rewards, advantages = scored_group()
    assert re.findall(r"\d\.\d\d", text) == [
        *(f"{r:.2f}" for r in rewards),
        f"{rewards.mean():.2f}",
    ]
    notebook = json.loads(
        (ROOT / "notebooks" / "04_grpo_by_hand.ipynb").read_text(encoding="utf-8")
    )
    sources = "".join("".join(cell["source"]) for cell in notebook["cells"])
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    shown = "".join("".join(out.get("data", {}).get("text/html", [])) for out in outputs)
    assert all(f'"{text}"' in sources for text in texts)
    assert all(f"<td>{a:.3f}</td>" in shown for a in advantages)


def test_the_page_is_short():
    assert len(PAGE.split()) <= 900
