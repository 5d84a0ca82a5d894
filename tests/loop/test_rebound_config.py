"""A notebook whose config cell is run again: the trainer that was made before says what it goes by."""

from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
BEFORE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import grpo_kit as kit
from standard_runs import own_task
model, tokenizer = kit.load_policy("tiny-random", quiet=True)
"""
CONFIG = "cfg = kit.Config(steps=STEPS, prompts_per_step=2, group_size=4, learning_rate=RATE)"
TRAINER = "trainer = kit.GRPOTrainer(model, own_task(), cfg, tokenizer=tokenizer, folder=FOLDER)"
SAID = "'cfg' was made again after this trainer"


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_a_config_that_was_made_again_is_said(tmp_path):
    def config(steps, rate):
        return CONFIG.replace("STEPS", steps).replace("RATE", rate)

    def trainer(name):
        return TRAINER.replace("FOLDER", repr(str(tmp_path / name)))

    codes = [
        BEFORE,
        config("1", "1e-3") + "\n" + trainer("run"),
        "trainer.train()",  # as made: nothing to say
        trainer("other"),
        config("1", "1e-3"),
        "trainer.train()",  # made again with the same values
        trainer("third"),
        config("2", "1e-2"),
        "trainer.train()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    same, again, changed = (printed(book.cells[place]) for place in (2, 5, 8))
    assert SAID not in same + again and "Traceback" not in same
    assert f"{SAID}, which goes by the earlier one: " in changed
    assert "steps=1, not 2" in changed and "learning_rate=0.001, not 0.01" in changed
