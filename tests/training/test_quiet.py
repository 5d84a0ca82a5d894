"""What a notebook would show as red boxes or leave as widgets: nothing, where a reader can do nothing about it."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import logging as transformers_logging

import grpo_kit.models  # noqa: F401  it leaves the bars out
from grpo_kit.training.quiet import quiet

TESTS = Path(__file__).parents[1]
RUN = """
import sys
import grpo_kit as kit
from datasets import Dataset
from grpo_kit.models.renamed import NAME as CHECKPOINTING
from tiny_run import letters, press_stop
from trl import GRPOConfig

def trainer(**options):
    args = GRPOConfig(
        output_dir=sys.argv[1], per_device_train_batch_size=4, num_generations=4, max_steps=4, bf16=False, use_cpu=True,
        max_completion_length=4, logging_steps=1, save_strategy="no", report_to=[], **{CHECKPOINTING: True},
    )
    rows = [{"prompt": [{"role": "user", "content": f"Say {i}"}]} for i in range(4)]
    model, tokenizer = kit.load_policy("tiny-random", tuning=sys.argv[2], quiet=True)
    options |= {"processing_class": tokenizer, "warmup": 0}
    return kit.GRPOTrainer(model, reward, args, Dataset.from_list(rows), **options)

steps = []
def reward(completions, **columns):
    steps.append(1)
    if len(steps) == 3:
        press_stop()
    return letters([c[0]["content"] for c in completions])

try:
    trainer(on_flag=lambda flag: None).train()
except BaseException as stopped:
    print("stopped by", type(stopped).__name__)
again = trainer(on_flag=lambda flag: None)
again.train(resume_from_checkpoint=True)
assert again.state.global_step == 4
again.save_model(sys.argv[1] + "/model")
if sys.argv[2] == "full":
    kit.load_policy(sys.argv[1] + "/model", quiet=True)
"""


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_run_with_checkpointing_stopped_resumed_saved_and_loaded_says_nothing_on_stderr(tmp_path, tuning):
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "run"), tuning],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_what_a_checkpoint_really_lacks_is_said():
    model = SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "model.embed_tokens.weight"})
    log, said = logging.getLogger("transformers.trainer"), []
    with quiet(model):
        log.addFilter(
            lambda record: said.append(record.getMessage())
        )  # after the others; and none goes further
        log.warning("There were missing keys in the checkpoint model loaded: ['lm_head.weight'].")
        log.warning("There were missing keys in the checkpoint model loaded: ['lm_head.weight', 'a.weight'].")
        log.warning("There were unexpected keys in the checkpoint model loaded: ['lm_head.weight'].")
    log.warning("There were missing keys in the checkpoint model loaded: ['lm_head.weight'].")
    log.removeFilter(log.filters[-1])
    assert [text.split(" keys")[0] for text in said] == [
        "There were missing",
        "There were unexpected",
        "There were missing",
    ]
    assert "a.weight" in said[0]


def test_other_warnings_of_the_future_are_shown():
    with warnings.catch_warnings(record=True) as seen, quiet(SimpleNamespace()):
        warnings.simplefilter("always", append=True)
        warnings.warn("`gradient_checkpointing_enable` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("`generate` will be removed", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["`generate` will be removed"]


def test_the_kit_itself_uses_no_old_name_of_checkpointing():
    """What it filters are trl's and peft's calls."""
    files = {path: path.read_text() for path in (TESTS.parent / "grpo_kit").rglob("*.py")}
    old = re.compile(r"\.(gradient_checkpointing_(enable|disable)|is_gradient_checkpointing)\b")
    assert not [path.name for path, text in files.items() if old.search(text)]


def test_other_bars_are_shown(capsys):
    assert list(transformers_logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(transformers_logging.tqdm([1, 2], desc="mine")) == [1, 2]
    assert "mine" in capsys.readouterr().err
