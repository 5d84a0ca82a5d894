"""Three public GRPO scripts, restated small: each runs under trl, and in the loop with two lines changed."""

from pathlib import Path

import pandas as pd
import pytest

from grpo_kit.loop import Loop
from grpo_kit.loop.batch import as_batch, render
from grpo_kit.models._model_facts import end_ids
from grpo_kit.record._lines import COMPLETIONS_LINES, lines_of
from grpo_kit.record.files import read_metrics
from grpo_kit.trainer import grpo_trainer as standard

SCRIPTS = Path(__file__).parent / "scripts"
IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"
RIGHT_XML = "<reasoning>\nI add.\n</reasoning>\n<answer>\n{}\n</answer>\n"
RIGHT_UNSLOTH = "I add.<end_working_out><SOLUTION>{}</SOLUTION>"
# script -> what is written in a group, of the row's right answer; the parts that each earns, by the script's functions.
WRITTEN = {
    "gsm8k_xml": (
        lambda row: [RIGHT_XML.format(row["answer"]), RIGHT_XML.format("no"), "<answer>\n1\n</answer>", ""],
        {
            "correctness_reward_func": [2.0, 0.0, 0.0, 0.0],
            "int_reward_func": [0.5, 0.0, 0.5, 0.0],
            "strict_format_reward_func": [0.5, 0.5, 0.0, 0.0],
            "soft_format_reward_func": [0.5, 0.5, 0.0, 0.0],
            "xmlcount_reward_func": [0.5, 0.5, 0.126, 0.0],
        },
        [1.0] * 5,
    ),
    "accuracy_cosine": (
        lambda row: [row["solution"], "no " * 5 + row["solution"], "no", "no " * 20],
        # A fourth row is one that nobody can judge. Lengths: a right one of 1 to 2 characters, one of 16 to 17, 2, 60.
        {"accuracy_reward": [1.0, 1.0, 0.0, 0.0], "cosine_scaled_reward": [0.9993, 0.9, -9.9740, -0.5]},
        [1.0, 0.5],
    ),
    "unsloth_style": (
        lambda row: [
            RIGHT_UNSLOTH.format(row["answer"]),
            RIGHT_UNSLOTH.format(f" {row['answer']} "),
            RIGHT_UNSLOTH.format("1000"),
            "no",
        ],
        {
            "match_format_exactly": [3.0, 3.0, 3.0, 0.0],
            "match_format_approximately": [1.5, 1.5, 1.5, -3.0],
            "check_answer": [5.0, 3.5, -2.5, -2.0],
            "check_numbers": [3.5, 3.5, -1.5, -2.5],
        },
        [1.0] * 4,
    ),
}  # fmt: skip


def changed(text):
    """The script with its two lines changed."""
    assert text.count(IMPORT) == 1 and text.count("trainer = GRPOTrainer(") == 1
    new = "from trl import GRPOConfig; from grpo_kit.more.bridges import from_trl\n"
    return text.replace(IMPORT, new).replace("trainer = GRPOTrainer(", "trainer = from_trl(")


def run(name, folder, change=lambda text: text):
    """What the script leaves behind."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    left = {"OUTPUT": str(folder), "__name__": "__main__"}
    exec(compile(change(text), name, "exec"), left)
    return left


@pytest.mark.parametrize("name", WRITTEN)
def test_a_script_runs_in_the_loop(tmp_path, monkeypatch, name, capsys):
    write, parts, weights = WRITTEN[name]
    fast = standard.fast

    def writing(model, tokenizer, task, rows, config, numbers):
        prompts = [
            ids
            for ids in render(model, tokenizer, task, rows, config.max_completion_tokens)
            for _ in range(4)
        ]
        texts = [text for row in rows for text in write(row["trl_row"])]
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        return as_batch(tokenizer, rows, 4, prompts, ids, end_ids(model, tokenizer))

    monkeypatch.setattr(standard, "fast", lambda *given: fast(*given)._replace(sample=writing))
    trainer = run(name, tmp_path / "run", changed)["trainer"]
    assert isinstance(trainer, Loop) and trainer.step == 2
    assert "Slower" not in capsys.readouterr().out
    table = pd.DataFrame(lines_of(tmp_path / "run" / COMPLETIONS_LINES))
    groups = [one for _, one in table.groupby(["step", "group"])]
    assert len(groups) == {"gsm8k_xml": 4, "accuracy_cosine": 8, "unsloth_style": 2}[name]
    judged = [one for one in groups if one["reward"].notna().all()]
    # the row of 81, once an epoch
    assert len(judged) == (6 if name == "accuracy_cosine" else len(groups))
    for group in judged:
        for part, wanted in parts.items():
            # lengths differ by a character
            close = 0.06 if part == "cosine_scaled_reward" else 1e-6
            assert list(group[f"reward/{part}"]) == pytest.approx(wanted, abs=close), part
        whole = sum(w * group[f"reward/{part}"] for w, part in zip(weights, parts, strict=True))
        assert list(group["reward"]) == pytest.approx(list(whole), abs=1e-6)
        assert group["advantage"].iloc[0] > 0 > group["advantage"].min()
    assert (read_metrics(tmp_path / "run")["grad_norm"] > 0).all()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_script_samples_by_the_engine(tmp_path, name, capsys):
    """As a reader runs it; tiny-random writes noise, which earns the lowest rewards."""
    trainer = run(name, tmp_path / "run", changed)["trainer"]
    assert trainer.step == 2 and type(trainer.sample).__name__ == "EngineSample"
    lowest = pd.DataFrame(lines_of(tmp_path / "run" / COMPLETIONS_LINES))["reward"].min()
    assert lowest < 0 if name != "gsm8k_xml" else lowest == 0
    saved = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert saved == {
        "gsm8k_xml": ["checkpoint-2"], "accuracy_cosine": [], "unsloth_style": ["checkpoint-1", "checkpoint-2"],
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_script_is_one_of_trls(tmp_path, name):
    trainer = run(name, tmp_path / "run")["trainer"]
    assert type(trainer).__module__.startswith("trl.") and trainer.state.global_step == 2
