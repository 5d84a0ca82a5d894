"""Going on with other things than before: each is obeyed, said and on record, or refused by name; and a longer run."""

import copy
import json
import re
import shutil
from dataclasses import replace

import few_words
import pytest
import torch
from loop_runs import letters, make, record, same, task, weights
from tokenizers import Tokenizer

from grpo_kit.loop import Config
from grpo_kit.loop.config import FIELDS
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.run_settings import differences, made_with
from grpo_kit.models import load_policy
from grpo_kit.record._digests import write_digests
from grpo_kit.record._lines import CHECKSUM, as_line
from grpo_kit.record.files import RENAMED, RunFolderError, run_settings
from grpo_kit.rewards import Gated, NumericAnswer, SoftFormat
from grpo_kit.schedules import cosine, linear, stepwise

DONE = 2  # steps of the runs that others go on with


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """kind -> the folder of a run of two steps with a checkpoint."""
    known, root = {}, tmp_path_factory.mktemp("runs")
    kinds = {"full": {}, "lora": {"tuning": "lora"}, "kl": {"beta": 0.1}}

    def of(kind):
        if kind not in known:
            known[kind] = root / kind
            make(known[kind], steps=DONE, save_steps=DONE, **kinds[kind]).train()
        return known[kind]

    return of


def policy(tuning="full", **lora):
    return few_words.policy(tuning, **lora)[0]


def moved(model):
    for p in model.parameters():
        p.data.mul_(1.01)
    return model


def renamed(completions, **columns):
    return [0.5 for _ in completions]


def without(task, name):
    kept = [reward for reward in task.rewards if getattr(reward, "__name__", "") != name]
    return replace(task, rewards=kept, reward_weights=[1 / len(kept)] * len(kept))


def longer(config):
    from transformers import LlamaForCausalLM

    config = copy.deepcopy(config)
    config.num_hidden_layers += 1
    return LlamaForCausalLM(config)


REFUSED = {
    "rewards: renamed": (
        "full",
        lambda: {"task": replace(task(), rewards=[*task().rewards[:-1], renamed])},
    ),
    "rewards: fewer": ("full", lambda: {"task": without(task(), "letters")}),
    "adapter.r: rank": ("lora", lambda: {"model": policy("lora", r=8)}),
    "adapter.lora_alpha: alpha": ("lora", lambda: {"model": policy("lora", lora_alpha=8)}),
    "adapter.lora_dropout: dropout": (
        "lora",
        lambda: {"model": policy("lora", lora_dropout=0.5)},
    ),
    "adapter.target_modules: fewer": (
        "lora",
        lambda: {"model": policy("lora", target_modules=["q_proj"])},
    ),
    "adapter.r: full for LoRA": ("lora", lambda: {"model": policy()}),
    "adapter.r: LoRA for full": ("full", lambda: {"model": policy("lora")}),
    "frozen_weights: another base": ("lora", lambda: {"model": moved(policy("lora"))}),
    "reference: another start": ("kl", lambda: {"model": moved(policy()), "beta": 0.1}),
    "trained: a larger model": ("full", lambda: {"model": longer(policy().config)}),
    "trained: another dtype": ("full", lambda: {"model": policy().bfloat16()}),
    "optimizer_kind: another": ("full", lambda: {"optimizer": "adamw-8bit"}),
    "seed: another": ("full", lambda: {"seed": 5}),
    "weight_decay: another": ("full", lambda: {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_another_run_is_refused_by_name_and_nothing_is_touched(what, runs, tmp_path):
    kind, given = REFUSED[what]
    folder = shutil.copytree(runs(kind), tmp_path / "run")
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file())
    trainer = make(folder, steps=4, **given())
    own = weights(trainer)
    with pytest.raises(
        RunFolderError, match=f"(?s)checkpoint-2 was made otherwise.*\n  {what.split(':')[0]}: "
    ) as error:
        trainer.train(resume=True)
    assert "load_policy(" in str(error.value), "the way out"
    assert same(weights(trainer), own) and trainer.step == 0 and trainer.config.steps == 4
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()) == before


def test_every_field_that_cannot_change_is_refused_by_name(runs, tmp_path):
    folder = shutil.copytree(runs("full"), tmp_path / "run")
    other = {
        "prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 4, "iterations": 2, "minibatches": 2,
        "seed": 1,
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "dynamic_sampling": 1, "loss": "grpo",
        "rollout_bits": 16,
        "level": "sequence", "loss_options": {"correct_kl": False},
        "scale": "none",
        "mask_truncated_completions": True, "warmup": 1, "optimizer": "adamw", "weight_decay": 0.1,
        "autocast": "bfloat16", "gradient_checkpointing": True, "micro_batch": 4,
    }  # fmt: skip
    fixed = {name for name, each in FIELDS.items() if not each.metadata["changes"]}
    around = {
        "preset",
        "model",
        "tuning",
        "dtype",
        "task",
        "task_options",
        "held_out",
        "eval_batch",
    }
    assert {*other} == fixed - around, "another field: give it a value here"
    trainer = make(folder, steps=4)
    for name, value in other.items():
        setattr(trainer.config, name, value)
    with pytest.raises(RunFolderError) as error:
        trainer.train(resume=True)
    lines = str(error.value).splitlines()
    assert {line.strip().partition(":")[0] for line in lines[1:-1]} == {*other}


def template(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ '' }}" + tokenizer.chat_template
    return tokenizer


def ends(model):
    model.generation_config.eos_token_id = [2, 5]
    return model


def rewritten():
    def letters(completions, **columns):
        return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]

    return replace(task(), rewards=[*task().rewards[:-1], letters])


class Letters:
    """letters() by settings: one of the class, one that is private, a default, one closed over."""

    __name__ = "letters"
    least = 1

    def __init__(self, power=1):
        self._power = power

    def __call__(self, completions, **columns):
        return [score**self._power for score in letters(completions)]


def letters_of(power, inner=letters):
    def letters(completions, *, power=power, **columns):
        return [score**power for score in inner(completions)]

    return letters


def paid_by(reward):
    """The task with this reward in place of letters."""
    return replace(task(), rewards=[*task().rewards[:-1], reward])


def cuts_otherwise(tokenizer):
    """The same tokens and template, without the last merge."""
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    made["model"]["merges"].pop()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(made))
    return tokenizer


AGAIN = {  # what a run began with, and what it goes on with: each is named as the third says
    "a kit reward's tolerance": (
        {"task": paid_by(NumericAnswer())}, {"task": paid_by(NumericAnswer(tolerance=5))}, "reward.numeric_answer",
    ),
    "a part's": (
        {"task": paid_by(Gated(NumericAnswer(), on=SoftFormat()))},
        {"task": paid_by(Gated(NumericAnswer(units="required"), on=SoftFormat()))},
        "reward.gated_numeric_answer",
    ),
    "a private attribute": ({"task": paid_by(Letters())}, {"task": paid_by(Letters(2))}, "reward.letters"),
    "a private pattern": (
        {"task": paid_by(Letters(re.compile("a")))}, {"task": paid_by(Letters(re.compile("b")))}, "reward.letters",
    ),
    "a class's attribute": (
        {"task": paid_by(Letters())}, {"task": paid_by(type("Letters", (Letters,), {"least": 2})())}, "reward.letters",
    ),
    "a default": ({"task": paid_by(letters_of(1))}, {"task": paid_by(letters_of(2))}, "reward.letters"),
    "weights": ({}, {"task": replace(task(), reward_weights=[0.1, 0.2, 0.7])}, "task.reward_weights"),
    "a tokenizer": ({}, {"tokenizer": cuts_otherwise(few_words.tokenizer())}, "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("what", AGAIN)
def test_other_settings_of_what_was_given_are_said_and_stand_in_the_changes(
    what, tmp_path, capsys
):
    before, after, name = AGAIN[what]
    trainer = make(tmp_path / "run", steps=1, **before)
    trainer.open()
    made, now = made_with(trainer), made_with(make(tmp_path / "other", steps=1, **after))
    assert {*differences(made, now)} == {name}
    assert {
        *differences(made, made_with(make(tmp_path / "same", steps=1, **copy.deepcopy(before))))
    } == set()
    trainer.task, trainer.tokenizer = (
        after.get("task", trainer.task),
        after.get("tokenizer", trainer.tokenizer),
    )
    trainer._changes.known |= made
    trainer._changes.begin(trainer, first=False)
    assert f"From step 1 on otherwise than before: {name} " in capsys.readouterr().out
    assert {*trainer._changes.of_step(trainer, {})[0]["changes"]} == {name}


OBEYED = {
    "reward.letters": lambda: {"task": rewritten()},
    "task.reward_weights": lambda: {"task": replace(task(), reward_weights=[0.1, 0.2, 0.7])},
    "tokenizer": lambda: {"tokenizer": cuts_otherwise(few_words.tokenizer())},
    "rows": lambda: {"task": replace(task(), train=task().train[::-1])},
    "system": lambda: {"task": replace(task(), system="Be brief.")},
    "prefill": lambda: {"task": replace(task(), prefill="So <answer>")},
    "template": lambda: {"tokenizer": template(few_words.tokenizer())},
    "ends": lambda: {"model": ends(policy())},
    "beta": lambda: {"beta": 0.1},
    "learning_rate": lambda: {"learning_rate": 1e-3},
}


@pytest.mark.parametrize("what", OBEYED)
def test_what_a_run_obeys_is_said_and_stands_in_its_changes(what, runs, tmp_path, capsys):
    folder = shutil.copytree(runs("full"), tmp_path / "run")
    trainer = make(folder, steps=3, save_steps=DONE, **OBEYED[what]())
    trainer.train(resume=True)
    rows = record(folder)[0]
    assert [{*row.get("changes", {})} for row in rows] == [set(), set(), {what, "steps"}]
    said = capsys.readouterr().out
    assert (
        f"From step 3 on otherwise than before: steps {DONE}, now 3; " in said
        and f"{what} " in said
    )
    again = make(folder, steps=4, save_steps=1, **OBEYED[what]())
    again.train(resume=True)
    rows = record(folder)[0]
    assert {*rows[2]["changes"]} == {what, "steps", "save_steps"}, (
        "no checkpoint was saved at 3: it is done again"
    )
    assert "changes" not in rows[3]


def test_a_number_that_is_asked_for_anew_wins_over_the_change_of_the_step_that_is_done_again(
    runs, tmp_path
):
    folder = shutil.copytree(runs("full"), tmp_path / "run")
    make(folder, steps=3, learning_rate=1e-3).train(resume=True)
    make(folder, steps=4, learning_rate=2e-3).train(resume=True)
    rows = record(folder)[0]
    assert [row["learning_rate"] for row in rows] == [1e-2, 1e-2, 2e-3, 2e-3]
    assert rows[2]["changes"]["learning_rate"] == [1e-2, 2e-3]


class LowersTheCap(Hook):
    def before_step(self, trainer):
        if trainer.step == DONE:
            trainer.config.importance_sampling_cap = 2.0


def test_a_run_with_the_former_names_of_fields_is_read_and_goes_on(tmp_path):
    """Run.json, checkpoint and changes as they were written before fields had the field's words."""
    config = {
        "steps": 3,
        "save_steps": DONE,
        "dynamic_sampling": 1,
        "importance_sampling_cap": 4.0,
    }
    first = make(tmp_path / "run", hooks=[LowersTheCap()], **config)
    first.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-3", ignore_errors=True)
    checkpoint = tmp_path / "run" / f"checkpoint-{DONE}"
    for path in (
        tmp_path / "run" / "run.json",
        checkpoint / "run_state.json",
        tmp_path / "run" / "metrics.jsonl",
    ):
        text = path.read_text()
        for former, name in RENAMED.items():
            assert path.suffix == ".jsonl" or f'"{name}"' in text
            text = text.replace(f'"{name}"', f'"{former}"')
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            text = "".join(
                as_line({k: v for k, v in line.items() if k != CHECKSUM}).decode()
                for line in lines
            )
            assert '"sampler_weight_cap": [4.0, 2.0]' in text
        path.write_text(text)
    write_digests(checkpoint, run_settings(tmp_path / "run")["run_id"])
    assert run_settings(tmp_path / "run")["config"]["dynamic_sampling"] == 1
    again = make(tmp_path / "run", **config)
    again.train(resume=True)
    assert same(weights(first), weights(again)) and again.config.importance_sampling_cap == 2.0
    with pytest.raises(RunFolderError, match="dynamic_sampling: 1, now 0"):
        make(tmp_path / "run", **config | {"dynamic_sampling": 0}).train(resume=True)


def test_settings_of_the_optimizer_are_the_trainers_and_on_record(runs, tmp_path, capsys):
    """The moments are the checkpoint's, as from_trl's adam_beta1 and adam_epsilon are the script's."""
    folder = shutil.copytree(runs("full"), tmp_path / "run")
    trainer = make(folder, steps=3)
    for group in trainer.optimizer.param_groups:
        group |= {"betas": (0.5, 0.6), "eps": 1e-3}
    trainer.train(resume=True)
    assert [(group["betas"], group["eps"]) for group in trainer.optimizer.param_groups] == [
        ((0.5, 0.6), 1e-3)
    ] * 2
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 3
    changes = record(folder)[0][2]["changes"]
    assert changes["optimizer.betas"][1] == [[0.5, 0.6], [0.5, 0.6]] and changes[
        "optimizer.eps"
    ][0] == [
        1e-8,
        1e-8,
    ]
    assert "optimizer.eps [1e-08, 1e-08], now [0.001, 0.001]" in capsys.readouterr().out


def test_another_optimizer_of_ones_own_is_refused_in_words(runs, tmp_path):
    trainer = make(shutil.copytree(runs("full"), tmp_path / "run"), steps=4)
    trainer.optimizer = torch.optim.SGD(trainer.trained.values(), lr=0.1)
    with pytest.raises(RunFolderError, match="optimizer_kind: 'AdamW', now 'SGD'"):
        trainer.train(resume=True)


def test_other_rows_between_stop_and_go_in_one_process_are_on_record_too(tmp_path, capsys):
    trainer = make(tmp_path / "run", steps=2)
    trainer.train()
    assert "otherwise" not in capsys.readouterr().out
    trainer.task = replace(task(), train=task().train[::-1])
    trainer.change(steps=3)
    trainer.train()
    assert {*record(trainer.folder)[0][2]["changes"]} == {"rows", "steps"}
    trainer.task = without(task(), "letters")
    with pytest.raises(RunFolderError, match="rewards: .*letters.*, now "):
        trainer.train()


def test_batches_that_wait_keep_the_rows_that_they_were_made_of(tmp_path):
    older = {"sync_every": 2, "buffer": "fifo", "lead": 1}
    make(tmp_path / "run", steps=2, save_steps=2, older=older).train()
    other = replace(task(), train=task().train[::-1])
    with pytest.raises(RunFolderError, match="rows: '16 rows, "):
        make(tmp_path / "run", task=other, older=older).train(resume=True)


def test_a_run_goes_on_from_its_own_checkpoints_model(tmp_path):
    """load_policy of a checkpoint, and train(resume=True) into the run's folder: the same weights, not another run."""
    for tuning in ("full", "lora"):
        fresh = lambda: load_policy(few_words.folder(), tuning=tuning, quiet=True)[0]  # noqa: B023, E731  an adapter names it
        whole = make(tmp_path / f"{tuning}-whole", model=fresh())
        whole.train()
        folder = tmp_path / tuning
        make(folder, model=fresh(), steps=2, save_steps=2).train()
        model = load_policy(folder / "checkpoint-2", tuning=tuning, quiet=True)[0]
        again = make(folder, model=model)
        again.train(resume=True)
        assert same(weights(again), weights(whole))


# ---- a longer run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [linear(1e-2, 0), cosine(1e-2, 0), linear(0, 1e-2), lambda p: 1e-2 * (1 - p)]
)
def test_an_extended_schedule_is_said_and_no_step_is_trained_at_rate_0(
    schedule, tmp_path, capsys
):
    trainer = make(
        tmp_path / "run", steps=3, learning_rate=schedule, temperature=linear(1.2, 1.0)
    )
    trainer.train()
    capsys.readouterr()
    trainer.change(steps=6)
    trainer.train()
    rows = record(trainer.folder)[0]
    assert all(row["learning_rate"] > 0 for row in rows) and len(rows) == 6
    said = capsys.readouterr().out
    assert f"runs over 6 steps now, not 3: {rows[3]['learning_rate']:.3g} in step 4" in said
    assert (
        "temperature: linear(start=1.2, end=1.0) runs over 6 steps now, not 3: 1.08 in step 4, 1 in the last"
        in said
    )
    assert rows[3]["temperature"] == pytest.approx(1.08) and rows[-1]["temperature"] == 1.0


def test_rates_by_hand():
    """Between the ends as before; an end at 0 lies a step outside."""

    def rates(steps, rate):
        config = Config(steps=steps, learning_rate=rate, warmup=0)
        return [config.at(step).learning_rate for step in range(steps)]

    assert rates(4, linear(0.5, 0)) == [0.5, 0.375, 0.25, 0.125]
    assert rates(3, linear(0, 0.5)) == pytest.approx([0.5 / 3, 1 / 3, 0.5])
    assert rates(3, lambda p: p * (1 - p)) == pytest.approx([3 / 16, 4 / 16, 3 / 16])
    assert rates(3, linear(0.5, 0.25)) == [0.5, 0.375, 0.25]
    assert rates(1, linear(0.5, 0)) == [0.5]
    assert rates(2, stepwise([0, 1.0], at=[0.5])) == [0, 1.0], "asked for in so many words"


def test_a_warmup_that_grows_with_the_run_is_in_the_rate_that_is_said(tmp_path, capsys):
    trainer = make(tmp_path / "run", steps=2, learning_rate=cosine(1e-2, 1e-3), warmup=0.5)
    trainer.train()
    trainer.change(steps=8)
    capsys.readouterr()
    trainer.train()
    rate = record(trainer.folder)[0][2]["learning_rate"]
    assert f"not 2: {rate:.3g} in step 3" in capsys.readouterr().out
