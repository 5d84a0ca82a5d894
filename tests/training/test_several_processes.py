"""Two processes on a CPU: one run folder, written by one of them, with the rows of both; and one card a process.

What they train is in test_ranks.py, how they end in test_together.py.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_run import letters, settings
from trl import GRPOTrainer as PlainTrainer

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.training.trainer import GRPOTrainer

TESTS = Path(__file__).parents[1]
SCRIPT = """
import os, sys
import torch
from datasets import Dataset
from tiny_run import data, letters, make
from grpo_kit.models import load_policy

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Say {i}"}] for i in range(8)]})
def reward(completions, **columns):
    return letters([c[-1]["content"] for c in completions])
options = {"dataset": rows, "rewards": reward, "per_device_train_batch_size": 2, "num_generations": 2}
trainer = make("kit", sys.argv[1] + "/whole", max_steps=2, save_strategy="steps", save_steps=1,
               eval_dataset=rows.select(range(2)), eval_strategy="steps", eval_steps=2,
               per_device_eval_batch_size=2, kit={"live": False}, **options)
trainer.train()
assert trainer.state.global_step == 2

model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
trainer = make("kit", sys.argv[1] + "/stopped", model=model, optim="sgd", learning_rate=1e-12, max_steps=3,
               kit={"on_flag": "stop"}, **options)
trainer.train()
assert trainer.state.global_step == 1 and trainer.stopped_by.name == "lost updates"
sys.stdout.write(f"done {rank}\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    (path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [*torchrun, str(path / "script.py"), str(path)]
    run = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = run.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the processes that it started too
        raise
    assert run.returncode == 0, out[-3000:] + errors[-3000:]
    (path / "out.txt").write_text(out)
    return path


def test_both_reach_the_end_and_one_speaks(folder):
    out = (folder / "out.txt").read_text()
    assert "done 0" in out and "done 1" in out
    assert out.count("step 2/2") == 1 and "cannot do this run" not in out


def test_one_folder_holds_the_rows_of_both(folder):
    metrics, table = read_metrics(folder / "whole"), read_completions(folder / "whole")
    assert metrics["step"].tolist() == [1, 2] and metrics["eval/reward"].notna().tolist() == [False, True]
    assert table.groupby("step")["group"].apply(list).tolist() == [[0, 0, 1, 1]] * 2
    for _, group in table.groupby(["step", "group"]):
        assert group["prompt"].nunique() == 1
        assert group["advantage"].sum() == pytest.approx(0, abs=1e-4)
    assert table.groupby("step")["reward"].mean().tolist() == pytest.approx(
        metrics["reward"].tolist(), abs=1e-5
    )
    assert {p.name for p in (folder / "whole").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


def test_a_red_flag_stops_both(folder):
    assert read_metrics(folder / "stopped")["step"].tolist() == [1]


def test_two_cards_in_one_process_are_one_and_it_says_how_to_use_both(tmp_path, capsys):
    """transformers would wrap the model in DataParallel, which trl refuses."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    args = settings(tmp_path, max_steps=1)
    args._n_gpu = args.n_gpu + 2
    rows = Dataset.from_dict({"prompt": [f"Say {i}" for i in range(8)]})
    with pytest.raises(ValueError, match="DataParallel"):
        PlainTrainer(model, letters, args, rows, processing_class=tokenizer)
    trainer = GRPOTrainer(model, letters, args, rows, processing_class=tokenizer, live=None)
    assert trainer.args.n_gpu == 1 and args.n_gpu == 2, "the caller's settings are left alone"
    assert trainer._wrap_model(trainer.model) is trainer.model, "transformers wraps where n_gpu is above 1"
    assert trainer.args.train_batch_size == args.per_device_train_batch_size, (
        "a batch is not that of two cards"
    )
    out = capsys.readouterr().out
    assert "accelerate launch --num_processes 2" in out and "notebook_launcher(f, num_processes=2)" in out
