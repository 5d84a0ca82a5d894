"""A notebook whose cells are run again, or fail: the trainer says what it goes by, the error what is wrong, first."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
BEFORE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import grpo_kit as kit
from standard_runs import own_task
model, tokenizer = kit.load_policy("tiny-random", quiet=True)
"""
REWARD = """
def letters(completions, **columns):
    return [sum(c.WHAT() for c in text) / max(len(text), 1) for text in completions]
"""
TASK = "task = own_task(letters)"
CONFIG = "cfg = kit.Config(steps=STEPS, prompts_per_step=2, group_size=4, learning_rate=RATE)"
TRAINER = "trainer = kit.GRPOTrainer(model, task, cfg, tokenizer=tokenizer, folder=FOLDER)"
TRAIN = "trainer.train()"
FAILS = REWARD.replace("[sum", "[1 / 0 * sum")
SAID = "was made again after this trainer"


def ran(tmp_path, *codes):
    """What each cell printed, or the lines of its error."""
    made = iter(range(100))
    codes = [code.replace("FOLDER", repr(str(tmp_path / f"run{next(made)}"))) for code in codes]
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code) for code in (BEFORE, *codes)]
    )
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", allow_errors=True
    ).execute()
    outputs = [cell.outputs for cell in book.cells[1:]]
    texts = {"stream": lambda out: out.text, "error": lambda out: "\n".join(out.traceback)}
    return [
        "".join(texts[o.output_type](o) for o in some if o.output_type in texts)
        for some in outputs
    ]


def config(steps, rate):
    return CONFIG.replace("STEPS", steps).replace("RATE", rate)


def reward(what):
    return REWARD.replace("WHAT", what)


def test_what_was_made_again_is_said(tmp_path):
    begin = "\n".join([reward("isalpha"), TASK, config("1", "1e-3")])
    said = ran(
        tmp_path,
        begin,
        TRAINER,
        TRAIN,  # as made: nothing to say
        TRAINER,
        begin + "\ncfg",
        TRAIN,  # made again, and the same
        TRAINER,
        config("2", "1e-2"),
        TRAIN,
        TRAINER,
        reward("islower"),
        TRAIN,
        TRAINER,
        TASK.replace("letters", "letters, system='Be brief.'"),
        TRAIN,
    )
    same, again, changed, rewarded, asked = said[2::3]
    assert SAID not in same + again and "Traceback" not in same + again
    assert (
        f"'cfg' {SAID}, which goes by the earlier one: " in changed and changed.count(SAID) == 1
    )
    assert "steps=1, not 2" in changed and "learning_rate=0.001, not 0.01" in changed
    assert (
        f"'letters' {SAID}" in rewarded
        and "run the cells that make task and the trainer" in rewarded
    )
    assert f"'task' {SAID}" in asked and rewarded.count(SAID) == asked.count(SAID) == 1


def test_an_error_of_a_reward_is_its_message_first_then_its_own_lines(tmp_path):
    shown = ran(
        tmp_path, FAILS.replace("WHAT", "isalpha"), TASK, config("1", "1e-3"), TRAINER, TRAIN
    )[-1]
    lines = shown.partition("RewardError: ")[2].splitlines()
    assert lines[0] == "reward 'letters' raised ZeroDivisionError: division by zero"
    assert lines[1].startswith("row 0, completion '")
    assert "[1 / 0 * sum" in shown and "grpo_kit" not in shown and len(lines) < 12


@pytest.mark.parametrize("name", ["00_start_here", "05_train_full", "06_train_lora"])
def test_running_the_config_cell_again_gives_no_cell_below_another_folder(name):
    """It makes the next run's name: what reads the run goes by the trainer's."""
    cells = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4).cells
    codes = [cell.source for cell in cells if cell.cell_type == "code"]
    made = next(n for n, code in enumerate(codes) if "trainer = kit.GRPOTrainer(" in code)
    later = "\n".join(codes[made + 1 :])
    assert "trainer.folder" in later and not re.search(r"(?<![\w.])folder\b(?!=)", later)
