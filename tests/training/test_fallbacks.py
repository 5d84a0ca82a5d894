"""What the kit's engine and update cannot do runs as in trl, with a word, once; nothing crashes."""

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from tiny_run import letters, make
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_kit.models import load_policy

VIRTUAL = [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig]
WORD = "The packed update cannot do this run"


def entries(which, folder, **options):
    trainer = make(which, folder, max_steps=2, **options)
    trainer.train()
    return trainer.state.log_history[:2]


@pytest.mark.parametrize("kind", VIRTUAL, ids=lambda kind: kind.__name__)
def test_virtual_tokens_train_as_in_trl(kind, tmp_path, capsys):
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=4)
    plain = entries("plain", tmp_path / "a", trl={"peft_config": config})
    kit = entries("kit", tmp_path / "b", trl={"peft_config": config})
    for name in ("loss", "grad_norm", "entropy", "reward"):
        assert [e[name] for e in kit] == pytest.approx([e[name] for e in plain], rel=1e-4, abs=1e-6), name
    assert (
        capsys.readouterr().out.count(f"{WORD} ({config.peft_type.value} adapters add virtual tokens)") == 1
    )


def test_other_adapters_are_packed_without_a_word(tmp_path, capsys):
    entries("kit", tmp_path, trl={"peft_config": IA3Config(task_type="CAUSAL_LM")})
    assert WORD not in capsys.readouterr().out


def test_another_model_type_is_said_once(tmp_path, capsys):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    trainer = make("kit", tmp_path, model=GPT2LMHeadModel(config), max_steps=2)
    trainer.train()
    out = capsys.readouterr().out
    assert out.count(f"{WORD} (model_type 'gpt2' is not one of llama, qwen2, qwen3)") == 1
    assert out.count("The kit's rollout engine cannot do this run (model_type 'gpt2'") == 1
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("skip", [True, False])
def test_masked_completions_of_prompts_of_one_token(skip, tmp_path):
    """Nothing is left to compute: neither a prompt's body nor a completion."""
    trainer = make(
        "kit", tmp_path, dataset=Dataset.from_dict({"prompt": list("abcdefgh")}), rewards=letters,
        mask_truncated_completions=True, max_completion_length=2, max_steps=2, kit={"skip_zero_advantage": skip},
    )  # fmt: skip
    assert all(len(ids) == 1 for ids in trainer._tokenize_prompts(list("abcdefgh"))[0])
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history[:2]] == [0.0, 0.0]
