"""What from_trl does with the fields that are no number of the loop's Config, and what it prints."""

import few_words
import pytest
import torch
from forced_runs import arguments, chats, points, texts, vowels
from peft import LoraConfig

from grpo_kit.integrations.trl import from_trl
from grpo_kit.models import load_policy


def made(
    folder, *, data=None, rewards=points, model=None, tokenizer=None, peft_config=None, given=None, **fields
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
    trainer = made(tmp_path, data=chats(), tokenizer=tokenizer, chat_template_kwargs={"mood": "calm"})
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
    trainer = from_trl(str(tmp_path / "saved"), points, args(model_init_kwargs=options), texts())
    assert trainer.model.dtype == torch.bfloat16 and trainer.model.config._attn_implementation == "eager"
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
    made(tmp_path, report_to=["tensorboard"], num_iterations=2, max_steps=3)
    printed = capsys.readouterr().out
    assert "report_to=['tensorboard']" in printed and "ends inside a rollout of 2 updates" in printed
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


def test_products_in_bfloat16(tmp_path):
    trainer = made(tmp_path, bf16=True, max_steps=1)
    before = {name: p.detach().clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert trainer.config.autocast == "bfloat16"
    assert any(not torch.equal(p, before[name]) for name, p in trainer.trained.items())
