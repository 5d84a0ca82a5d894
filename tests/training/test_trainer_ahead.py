"""Rewards that begin while others still write: with the text and columns of their call, in a real run, and dropped."""

import pytest
import torch
from tiny_run import data, make

from grpo_kit.record.files import read_completions
from grpo_kit.rewards import CodeRunner, RewardError, WeightedSum
from grpo_kit.rewards.code_tests import Job
from grpo_kit.sandbox import isolation
from grpo_kit.training.ahead import spare_cores

OPTIONS = dict(max_completion_length=24, max_steps=2, num_generations=4, per_device_train_batch_size=8)


class Lengths:
    """A reward that notes what it is begun with and called with."""

    def __init__(self, fails=False):
        self.__name__ = "lengths"
        self.begun, self.called, self.looks, self.drops = [], [], 0, 0
        self.fails = fails

    def begin(self, completions, *, workers, **columns):
        assert workers >= 1
        self.looks += 1
        self.begun += list(self._rows(completions, columns))

    def drop(self):
        self.drops += 1

    def __call__(self, completions, **columns):
        self.called += list(self._rows(completions, columns))
        if self.fails:
            raise RuntimeError("cannot")
        return [min(1.0, len(str(text)) / 100) for text in completions]

    def _rows(self, completions, columns):
        names = [name for name, value in columns.items() if isinstance(value, list)]
        for row, completion in enumerate(completions):
            yield repr((completion, sorted((name, columns[name][row]) for name in names)))


def trainer_of(folder, reward, *, spare=1, ends=8, **options):
    """ends: every so many tokens of the vocabulary end a completion, so that rows end early and apart."""
    trainer = make("kit", folder, rewards=reward, **(OPTIONS | options))
    trainer._ahead.spare = spare
    vocabulary = trainer.model.config.vocab_size
    trainer.generation_config.eos_token_id = list(range(3, vocabulary, ends))
    return trainer


def conversations(rows=8):
    asked = [[{"role": "user", "content": f"Say {i}"}] for i in range(rows)]
    return [{"prompt": p, "answer": str(i)} for i, p in enumerate(asked)]


def prefilled(rows=8):
    ends = {"role": "assistant", "content": "<answer>"}
    return [{**row, "prompt": [*row["prompt"], ends]} for row in conversations(rows)]


@pytest.mark.parametrize("dataset", [data, conversations, prefilled])
def test_begun_with_the_text_and_columns_of_the_call(dataset, tmp_path):
    reward = Lengths()
    trainer = trainer_of(tmp_path, reward, dataset=dataset(), eval_dataset=dataset(4))
    trainer.train()
    trainer.evaluate()
    assert len(reward.called) == 2 * 8 + 4 * trainer.num_generations_eval
    begun = len(reward.begun)
    assert begun == len(set(reward.begun)) and begun > len(reward.called) / 2
    assert set(reward.begun) <= set(reward.called)
    assert reward.looks > 20, "asked to go on at every look"
    assert ("<answer>" in reward.called[0]) == (dataset is prefilled)


def test_a_run_is_the_same_with_and_without(tmp_path):
    tables = []
    for spare in (0, 2):
        reward = Lengths()
        trainer = trainer_of(tmp_path / str(spare), reward, spare=spare)
        trainer.train()
        assert bool(reward.begun) == bool(spare)
        tables.append(read_completions(tmp_path / str(spare)))
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        tables.append(weights)
    assert tables[0].equals(tables[2]) and torch.equal(tables[1], tables[3])


def test_other_engines_begin_nothing(tmp_path):
    reward = Lengths()
    trainer_of(tmp_path, reward, kit={"rollout": "hf"}, max_steps=1).train()
    assert reward.called and not reward.looks


def test_nothing_begins_where_a_row_is_not_known_for_certain(tmp_path):
    trainer = trainer_of(tmp_path, Lengths())
    rows = data().to_list()

    def listens(rows, completions=8):
        with trainer._ahead.of(rows):
            return trainer._ahead.listener(completions) is not None

    assert listens(rows) and not listens(rows, 7)
    assert not listens([{**row, "images": []} for row in rows])
    for name, value in {"tools": [len], "environment_factories": {}, "rollout_func": len}.items():
        before = getattr(trainer, name)
        setattr(trainer, name, value)
        assert not listens(rows), name
        setattr(trainer, name, before)
    trainer._tokenizer.response_schema = {}
    assert listens(rows) and not listens(conversations())


class Programs:
    """Runs a program of each completion's: for the first `endless` of them one that never ends."""

    def __init__(self, endless):
        self.__name__, self.endless, self.begun = "programs", endless, 0
        self.runner = CodeRunner(seconds=60, allow_unsafe=isolation() is None)

    def begin(self, completions, *, workers, **columns):
        jobs = [
            Job(f"x = {text!r}\nwhile {self.begun < self.endless}: pass", None, ()) for text in completions
        ]
        self.begun += len(jobs)
        self.runner.begin(jobs, workers=workers)

    def drop(self):
        self.runner.drop()

    def __call__(self, completions, **columns):
        raise KeyboardInterrupt if self.endless else RuntimeError("cannot")


@pytest.mark.parametrize(("endless", "error"), [(1, KeyboardInterrupt), (0, RewardError)])
def test_what_was_begun_ends_with_the_step(endless, error, tmp_path):
    reward = Programs(endless)
    inner = WeightedSum([(reward, 0.5), (Lengths(), 0.5)])
    trainer = trainer_of(tmp_path, inner)
    with pytest.raises(error):
        trainer.train()
    assert reward.begun
    runner = reward.runner
    assert runner._batch is None and not runner._running and not runner._ahead


def test_an_interrupt_while_others_write_ends_what_was_begun(tmp_path):
    reward = Programs(1)
    trainer = trainer_of(tmp_path, reward)
    begin = reward.begin

    def press(completions, **columns):
        begin(completions, **columns)
        if reward.runner._running:
            raise KeyboardInterrupt

    reward.begin = press
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert reward.begun and reward.runner._batch is None and not reward.runner._running


def test_spare_cores():
    import os

    cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores)
        assert spare_cores(torch.device("cpu")) == 0
        torch.set_num_threads(1)
        assert spare_cores(torch.device("cpu")) == cores - 1
        assert spare_cores(torch.device("cuda")) == cores - 1
    finally:
        torch.set_num_threads(before)
