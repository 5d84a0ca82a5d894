"""What from_trl does with the fields that are no number of the loop's Config, and what it prints."""

import re

import few_words
import pytest
import torch
from forced_runs import arguments, chats, points, texts, vowels
from peft import LoraConfig

from grpo_kit.models import load_policy
from grpo_kit.more.bridges.trl import from_trl
from grpo_kit.record.files import read_metrics
from grpo_kit.rewards import Clipped, Gated, WeightedSum


def letters(completions, **columns):
    return [0.5 for _ in completions]


def short(completions, **columns):
    return [1.0 for _ in completions]


def made(
    folder,
    *,
    data=None,
    rewards=points,
    model=None,
    tokenizer=None,
    peft_config=None,
    given=None,
    **fields,
):
    own, words = few_words.policy()
    return from_trl(
        own if model is None else model, rewards, arguments(folder, **fields), texts() if data is None else data,
        processing_class=words if tokenizer is None else tokenizer, peft_config=peft_config, **(given or {}),
    )  # fmt: skip


def test_the_folder_is_output_dir_unless_another_is_named(tmp_path):
    assert made(tmp_path / "a").folder == tmp_path / "a"
    assert made(tmp_path / "a", given={"folder": tmp_path / "b"}).folder == tmp_path / "b"


def test_the_chat_template_gets_its_arguments(tmp_path):
    _, tokenizer = few_words.policy()
    tokenizer.chat_template = "{{ mood }}: {{ messages[-1]['content'] }}"
    trainer = made(
        tmp_path, data=chats(), tokenizer=tokenizer, chat_template_kwargs={"mood": "calm"}
    )
    assert trainer.task.render(tokenizer, trainer.task.train[1:2]) == ["calm: Say 1."]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        made(tmp_path, data=chats(), tokenizer=tokenizer)


@pytest.mark.parametrize("removed", [True, False])
def test_rewards_get_the_columns_unless_they_are_removed(tmp_path, removed):
    seen = []

    def watched(completions, prompts, **columns):
        seen.append("size" in columns)
        return [float(len(prompt)) for prompt in prompts]

    made(tmp_path, rewards=watched, remove_unused_columns=removed, max_steps=1).train()
    assert seen == [not removed]


def test_an_asynchronous_reward_is_waited_for(tmp_path):
    async def slow(completions, **columns):
        return [float(len(text)) for text in completions]

    trainer = made(tmp_path, rewards=[slow, vowels], max_steps=1)
    trainer.train()
    assert '"reward/slow"' in (tmp_path / "metrics.jsonl").read_text()


def test_a_model_is_loaded_by_its_name_as_args_say(tmp_path):
    args = lambda **more: arguments(tmp_path / "run", **more)  # noqa: E731
    trainer = from_trl("tiny-random", points, args(), texts())
    assert trainer.model.dtype == torch.float32 and trainer.tokenizer.pad_token
    load_policy("tiny-random", quiet=True)[0].save_pretrained(tmp_path / "saved")
    trainer.tokenizer.pad_token = None
    trainer.tokenizer.save_pretrained(tmp_path / "saved")
    options = {"dtype": "bfloat16", "attn_implementation": "eager"}
    trainer = from_trl(
        str(tmp_path / "saved"), points, args(model_init_kwargs=options), texts()
    )
    assert (
        trainer.model.dtype == torch.bfloat16
        and trainer.model.config._attn_implementation == "eager"
    )
    assert trainer.tokenizer.pad_token == trainer.tokenizer.eos_token
    assert type(trainer.optimizer).__name__ == "SplitAdamW8bit"  # what bfloat16 weights need


@pytest.mark.parametrize("off", [True, False])
def test_dropout_is_disabled_where_args_say_so(tmp_path, off):
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"])
    trainer = made(tmp_path, peft_config=lora, disable_dropout=off)
    found = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert found == ({0.0} if off else {0.5})
    assert all("lora" in name for name in trainer.trained)
    with pytest.raises(ValueError, match="one of the two"):
        made(tmp_path, model=trainer.model, peft_config=lora)


def test_what_is_ignored_is_said(tmp_path, capsys):
    made(tmp_path, run_name="mine", num_iterations=2, max_steps=3)
    printed = capsys.readouterr().out
    assert "run_name='mine'" in printed and "ends inside a rollout of 2 updates" in printed
    made(tmp_path, report_to="none", num_iterations=2)
    assert capsys.readouterr().out == ""


def test_rewards_know_how_far_training_is(tmp_path):
    seen = []

    def watched(completions, trainer_state, **columns):
        seen.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        return [float(len(text)) for text in completions]

    made(tmp_path, rewards=watched, num_iterations=2, max_steps=6).train()
    assert seen == [
        (0, 6, 0),
        (2, 6, pytest.approx(1 / 3)),
        (4, 6, pytest.approx(2 / 3)),
    ]  # 3 rollouts see 6 rows


REFUSED_BEFORE = {
    "reward_weights": ([0.0], [float("nan")], [float("inf")], [1.0, 2.0], "1"),
    "learning_rate": (float("nan"), float("inf"), -1e-5, "1e-5", 0.0),
    "temperature": (float("nan"), 0.0, -1.0, float("inf"), None),
    "num_train_epochs": (float("nan"), float("inf"), 0.0, -1.0),
    "adam_beta1": (float("nan"), 1.0, -0.1, float("inf")),
    "adam_epsilon": (float("nan"), -1e-8, float("inf")),
    "max_grad_norm": (float("nan"), float("inf"), -1.0),
    "per_device_train_batch_size": (0, -4, 2.5),
    "gradient_accumulation_steps": (0, -1, float("nan")),
    "num_generations": (0, 1, -4, 2.5),
    "max_completion_length": (0, -1, None, 2.5),
    "save_steps": (0, float("nan"), -5),
    "report_to": (["mlflow"], ["tensorboard", "comet_ml"]),
    "eval_strategy": ("steps", "epoch"),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path, name):
    for value in REFUSED_BEFORE[name]:
        args = arguments(
            tmp_path, save_strategy="steps", max_steps=-1 if name == "num_train_epochs" else 2
        )
        setattr(args, name, value)
        if name == "eval_strategy":
            args.eval_steps = 1
        with pytest.raises(ValueError, match=name):
            from_trl("no/such-model", points, args, texts())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fields, measured",
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, [0, 2, 4, 5]),
        ({"eval_strategy": "epoch"}, [0, 3, 5]),  # 6 rows, 2 a step
        ({"eval_strategy": "steps", "eval_steps": 0.6}, [0, 3, 5]),
        ({"eval_on_start": True}, [0, 5]),
        ({}, []),
    ],
)
def test_eval_dataset_is_the_held_out_rows(tmp_path, fields, measured):
    calls = []

    def watched(completions, prompts, **columns):
        calls.append(len(completions))
        return [float(len(prompt)) for prompt in prompts]

    held_out = [{"prompt": f"Name {i}:", "size": i} for i in range(3)]
    trainer = made(
        tmp_path, rewards=watched, given={"eval_dataset": held_out}, max_steps=5, **fields
    )
    trainer.train()
    table = read_metrics(tmp_path)
    steps = (
        []
        if "eval/reward" not in table
        else table.loc[table["eval/reward"].notna(), "step"].tolist()
    )
    assert (
        steps == measured
        and calls.count(3) == len(measured)
        and len(trainer.task.held_out) == 3
    )
    assert "eval/accuracy" not in table


def test_a_run_is_shown_and_tracked_as_one_of_the_kits_own(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    trainer = made(tmp_path / "run", report_to=["tensorboard"], learning_rate=0.5, max_steps=4)
    trainer.train()
    printed = capsys.readouterr().out
    assert "step 4" in printed.lower() and "tensorboard:" in printed
    assert (
        list((tmp_path / "run/tensorboard").iterdir()) and (tmp_path / "run/README.md").exists()
    )
    names = {type(hook).__name__ for hook in trainer.hooks}
    assert {"WatchRun", "OffScale", "StillStep", "ControlFolder", "Watchdog"} <= names
    # args.output_dir, as scripts end
    assert trainer.save_model(tmp_path / "run") == tmp_path / "run/model"
    assert trainer.save_model(tmp_path / "run") == tmp_path / "run/model-2"
    assert load_policy(str(tmp_path / "run/model"), quiet=True)[0].dtype == torch.float32


@pytest.mark.parametrize("data", [texts, chats])
def test_rewards_made_of_others_report_their_parts(tmp_path, data):
    whole = WeightedSum(
        {Clipped(points, low=-5, high=20): 0.75, Gated(letters, on=short): 0.25}
    )
    trainer = made(tmp_path, data=data(), rewards=[whole, vowels], max_steps=1)
    trainer.train()
    columns = read_metrics(tmp_path).columns
    parts = {
        "clipped_points",
        "points",
        "gated_letters",
        "letters",
        "short",
        "vowels",
        "weighted_sum",
    }
    assert {f"reward/{name}" for name in parts} <= {*columns}


@pytest.mark.parametrize(
    "name, here",
    [
        ("args", "trainer.config"),
        ("state", "trainer.step, and kit.read_metrics"),
        ("evaluate", "kit.evaluate(trainer.model"),
        ("push_to_hub", "trainer.model.push_to_hub"),
        ("processing_class", "tokenizer= of the trainer"),
        ("lr_scheduler", "learning_rate, with a schedule"),
        ("save_modle", "did you mean 'save_model'"),
    ],
)
def test_what_trls_trainer_has_is_called_otherwise(tmp_path, name, here):
    trainer = made(tmp_path)
    with pytest.raises(AttributeError, match=re.escape(here)):
        getattr(trainer, name)
    with pytest.raises(ValueError, match=re.escape("here it is train(resume=True)")):
        trainer.train(resume_from_checkpoint=True)
    assert not hasattr(trainer, name) and trainer.step == 0


def test_products_in_bfloat16(tmp_path):
    trainer = made(tmp_path, bf16=True, max_steps=1)
    before = {name: p.detach().clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert trainer.config.autocast == "bfloat16"
    assert any(not torch.equal(p, before[name]) for name, p in trainer.trained.items())
