"""docs/which_method.md: its tree, and what its methods name; notebook 10 leads there."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import grpo_kit as kit
from benchmarks.advice.table import anchor
from grpo_kit import objectives
from grpo_kit.evaluation.readiness import VERDICTS
from grpo_kit.more.lab.preferences import Samples

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "which_method.md").read_text(encoding="utf-8")
ADVICE = (ROOT / "benchmarks" / "results" / "advice.md").read_text(encoding="utf-8")
TABLE = ADVICE[: ADVICE.index("## Asked again")]
TREE = re.findall(
    r"^ *- .*", PAGE[PAGE.index("## The questions") : PAGE.index("## The methods")], re.M
)
SECTION = re.compile(
    r"^### (?P<name>.*)\n\n(?P<why>.*)\n\n"
    r"- Models: (?P<models>.*?)\. Data: (?P<data>.*?)\. Samples while it trains: (?P<online>.*)\.\n"
    r"- Use: (?P<use>.*)\. See: \[.*\]\((?P<see>.*)\)\.\n"
    r"- Check first: (?P<check>.*)\n"
    r"- Advised by: (?P<says>.*?)(?:\. Measured: (?P<measured>.*))?\.$",
    re.M,
)
METHODS = {found["name"]: found.groupdict() for found in SECTION.finditer(PAGE)}

# What a practitioner would advise, written down without the page: the first words of the answers on the way.
EXPECTED = {
    "a program:/format first": "Prefill, then GRPO",
    "a program:/never succeeds/yes": "SFT on demonstrations, then GRPO",
    "a program:/never succeeds/no": "Softer reward or easier rows, then GRPO",
    "a program:/shortcut pays": "Rows without a shortcut, then GRPO",
    "a program:/rarely succeeds/yes": "SFT on its own right samples, then GRPO",
    "a program:/rarely succeeds/no": "GRPO with weights on positives",
    "a program:/ready/no": "GRPO",
    "a program:/ready/yes": "GSPO",
    "a program:/too easy": "Harder rows, or stop",
    "a program, and I hold pairs": "DPO, then GRPO",
    "no program/pairs/yes/mostly": "DPO",
    "no program/pairs/yes/always": "IPO",
    "no program/pairs/no/yes": "SimPO",
    "no program/pairs/no/no": "ORPO",
    "no program/single answers": "KTO",
    "no program/good answers": "SFT",
    "no program/people or a judge model/yes": "Reward model, then GRPO",
    "no program/people or a judge model/no": "Reward model, then PPO",
}


def leaves():
    """(the answers on the way, method, its notebook) of every arrow."""
    path = []
    for line in TREE:
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [
            line.strip()
            .removeprefix("- ")
            .replace("**", "", 2 * line.lstrip().startswith("- **"))
        ]
        if "→" in line:
            yield (*path,), *re.search(r"→ \*\*(.*)\*\*, \[.*\]\((.*)\)$", line).groups()


def test_every_method_is_reached_by_the_answers_that_a_practitioner_would_give():
    found = list(leaves())
    assert len(found) == len(EXPECTED)
    for (answers, method, _), (expected, name) in zip(found, EXPECTED.items(), strict=True):
        words = expected.split("/")
        assert len(answers) == len(words) <= 4 and method == name
        assert all(a.startswith(w) for a, w in zip(answers, words, strict=True)), (
            answers,
            words,
        )


def test_each_method_of_the_tree_has_its_section_and_no_other():
    assert sorted(METHODS) == sorted(EXPECTED.values()) and PAGE.count("\n### ") == len(METHODS)
    assert {name: see for _, name, see in leaves()} == {
        name: m["see"] for name, m in METHODS.items()
    }
    for method in METHODS.values():
        assert (ROOT / "docs" / method["see"]).is_file()


def test_notebook_10_leads_to_the_tree_and_answers_its_question_alike():
    cells = json.loads((ROOT / "notebooks" / "10_preferences_then_grpo.ipynb").read_text())[
        "cells"
    ]
    said = {cell["id"]: "".join(cell["source"]) for cell in cells}
    assert "](../docs/which_method.md)" in said["tree-00"]
    answer = re.search(
        r"DPO, with two models. With one: (\w+) after SFT, (\w+) for a base model",
        said["tree-05"],
    )
    assert EXPECTED["no program/pairs/yes/mostly"] == "DPO"
    assert answer.groups() == (
        EXPECTED["no program/pairs/no/yes"],
        EXPECTED["no program/pairs/no/no"],
    )


def test_the_second_question_has_the_verdicts_of_readiness():
    assert set(re.findall(r"^  - \*\*(.*?)\*\*: ", "\n".join(TREE), re.M)) == set(VERDICTS)


@pytest.mark.parametrize("name", METHODS)
def test_what_it_uses_can_be_imported(name):
    used = re.findall(r"`([\w.]+)`", METHODS[name]["use"])
    assert used
    for dotted in used:
        module, _, attribute = dotted.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), dotted


def test_settings_that_the_methods_name_exist():
    from trl import DPOConfig
    from trl.experimental.cpo import CPOConfig

    trls = {"output_dir": "unused", "bf16": False, "report_to": "none"}
    weights = {"positive_weight": 2, "negative_weight": 0}
    settings = {
        "GSPO": (kit.Config, {"loss": "gspo"}),
        "GRPO with weights on positives": (kit.Config, weights),
    }
    settings["IPO"] = (DPOConfig, {"loss_type": "ipo"})
    settings["SimPO"] = (CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0})
    for name, (config, values) in settings.items():
        named = dict(re.findall(r"(\w+)='?(\w+)'?", METHODS[name]["why"]))
        assert named == {key: str(value) for key, value in values.items()}
        config(**values, **({} if config is kit.Config else trls))
    for loss in re.findall(r"loss '(\w+)' or '(\w+)'", METHODS["GRPO"]["why"])[0]:
        kit.Config(loss=loss, beta=0)


def test_metrics_and_methods_that_the_checks_name_exist():
    import trl

    checks = {name: method["check"] for name, method in METHODS.items()}
    dpo = inspect.getsource(inspect.getmodule(trl.DPOTrainer))
    for metric in ("rewards/margins", "logps/chosen"):
        assert metric in checks["DPO"] and f'"{metric}"' in dpo
    loop = {
        file: (ROOT / "grpo_kit" / "loop" / file).read_text()
        for file in ("score.py", "policy_loss.py")
    }
    positives = checks["GRPO with weights on positives"]
    assert "frac_reward_zero_std" in positives and '"frac_reward_zero_std"' in loop["score.py"]
    assert (
        "rollout/logprob_gap" in checks["GSPO"]
        and '"rollout/logprob_gap"' in loop["policy_loss.py"]
    )
    assert (
        "samples.summary()" in checks["SFT on its own right samples, then GRPO"]
        and Samples.summary
    )
    assert "task.best_constant()" in checks["GRPO"] and kit.tasks.Task.best_constant
    for name in re.findall(r"kit\.(\w+)", PAGE):
        assert name in kit.__all__ or hasattr(kit, name), name


@pytest.mark.parametrize("name", METHODS)
def test_advice_has_a_source_and_measured_claims_are_rows_of_the_table(name):
    method = METHODS[name]
    marks = re.findall(r"\b[A-E]\d+\b", method["says"])
    assert marks or re.search(r"arXiv:\d{4}\.\d{5}", method["says"])
    assert all(f"**{mark[0]}** " in ADVICE for mark in marks), (
        "its letter is explained under the table"
    )
    for claim, to in re.findall(r"\[([^]]*)\]\(([^)]*)\)", method["measured"] or ""):
        rows = [line for line in TABLE.splitlines() if line.startswith(f"| [{claim}]")]
        assert len(rows) == 1, claim
        link, by = re.search(r"\]\(\.\./\.\./notebooks/([^)]*)\)([^|]*) \|", rows[0]).groups()
        assert (
            to
            == f"../notebooks/{link}"
            == f"../notebooks/15_the_advice_measured.ipynb#{anchor(claim)}"
        )
        assert set(re.findall(r"[A-E]\d+", by)) & set(marks), (
            "measured is what its advisers claim"
        )


def test_models_in_memory_are_those_the_losses_and_the_advice_count():
    # As write-up E counts them; GRPO's second is the reference, which beta = 0 saves.
    for name, total in {"DPO": 2, "IPO": 2, "KTO": 2, "ORPO": 1, "SimPO": 1}.items():
        assert METHODS[name]["models"] == f"1 trained, {total - 1} frozen"
        loss = getattr(objectives, name.lower())
        assert f"`grpo_kit.objectives.{name.lower()}`" in METHODS[name]["use"]
        assert any(p.startswith("ref") for p in inspect.signature(loss).parameters) == (
            total == 2
        )
    assert METHODS["Reward model, then PPO"]["models"] == "2 trained, 2 frozen"
    assert METHODS["Reward model, then GRPO"]["models"] == "1 trained, 2 frozen"
    assert METHODS["GRPO"]["models"] == METHODS["SFT"]["models"] == "1 trained, 0 frozen"
    assert METHODS["Harder rows, or stop"]["models"] == "none"


def test_online_is_what_samples_while_it_trains():
    for name, method in METHODS.items():
        grpo = bool(re.search("GRPO|PPO|GSPO", name))
        first_offline = bool(re.search("^(SFT|DPO)", name))
        assert method["online"] == (
            "no, then yes" if grpo and first_offline else "yes" if grpo else "no"
        ), name


def test_the_memory_of_a_model_is_what_the_plan_adds_up():
    trained, frozen = re.search(
        r"takes ([\d.]+) GiB in the `gpu24` profile.*?, ([\d.]+) GiB\.", PAGE, re.S
    ).groups()
    parts = kit.plan_memory(kit.preset("gpu24", beta=0.1)).parts["update"]
    whole = sum(parts[part] for part in ("weights", "gradients", "optimizer")) / 2**30
    assert f"{whole:.1f}" == trained and f"{parts['reference model'] / 2**30:.1f}" == frozen
