"""What a notebook would show as red boxes: nothing, where a reader can do nothing about it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

import grpo_kit.models  # noqa: F401  it leaves the bars out

TESTS = Path(__file__).parents[1]
RUN = """
import sys
import grpo_kit as kit
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.loop import Config
from loop_runs import letters, press_stop
import few_words

steps, folder = [], None
def reward(completions, **columns):
    steps.append(1)
    if len(steps) == 3:
        press_stop()
    return letters(completions)

rows = [{"question": f"Say {i}", "answer": str(i)} for i in range(5)]
task = kit.tasks.from_rows("quiet", rows[:4], rows[4:], reward=reward, max_completion_tokens=4)

def trainer():
    model, tokenizer = kit.load_policy(few_words.folder(), tuning=tuning, quiet=True)
    config = Config(steps=4, prompts_per_step=1, group_size=4, gradient_checkpointing=way == "plain")
    seams = {}
    if way == "plain":
        from grpo_kit.loop.batch import generate
        from grpo_kit.loop.padded_update import PaddedUpdate
        seams = {"sample": generate, "update": PaddedUpdate(config)}
    return GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, on_flag=lambda flag: None, **seams)

for tuning, way in (("full", "plain"), ("lora", "fast")):
    folder = f"{sys.argv[1]}/{way}"
    steps.clear()
    try:
        trainer().train()
    except BaseException as stopped:
        print("stopped by", type(stopped).__name__)
    again = trainer()
    again.train(resume=True)
    assert again.step == 4
    again.save_model(folder + "/model")
    kit.load_policy(folder + "/model", tuning=tuning, quiet=True)
"""


no_bars = pytest.mark.skipif(
    not hasattr(transformers_logging, "set_tqdm_hook"),
    reason="transformers before 5.5 keeps its bars",
)


@no_bars
def test_a_run_stopped_resumed_saved_and_loaded_says_nothing_on_stderr(tmp_path):
    """Two runs in one new interpreter: fully and plainly, and by LoRA and the fast ways."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stopped by Stopped") == 2 and done.stderr == ""


def test_the_kit_itself_uses_no_old_name_of_checkpointing():
    files = {path: path.read_text() for path in (TESTS.parent / "grpo_kit").rglob("*.py")}
    old = re.compile(r"\.(gradient_checkpointing_(enable|disable)|is_gradient_checkpointing)\b")
    assert not [path.name for path, text in files.items() if old.search(text)]


@no_bars
def test_other_bars_are_shown(capsys):
    assert list(transformers_logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(transformers_logging.tqdm([1, 2], desc="mine")) == [1, 2]
    assert "mine" in capsys.readouterr().err
