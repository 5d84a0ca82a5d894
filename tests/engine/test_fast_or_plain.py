"""What engine and packed update cannot do runs by the plain ways, with a word, once; nothing crashes."""

import pytest
import torch
from loop_runs import letters, make, record, task
from peft import (
    IA3Config,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_kit.engine.fast import EngineSample, fast
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Config
from grpo_kit.loop.batch import generate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models import load_policy
from grpo_kit.tasks import from_rows
from grpo_kit.trainer.grpo_trainer import GRPOTrainer

VIRTUAL = [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig]


@pytest.mark.parametrize("kind", VIRTUAL, ids=lambda kind: kind.__name__)
def test_virtual_tokens_train_by_the_plain_ways(kind, tmp_path, tiny):
    torch.manual_seed(0)
    model = get_peft_model(tiny[0], kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    seams = fast(model, Config())
    assert seams.sample is generate and isinstance(seams.update, PaddedUpdate)
    assert (
        f"{kind(task_type='CAUSAL_LM').peft_type.value} adapters add virtual tokens"
        in seams.why_not
    )
    trainer = make(tmp_path / "run", model=model, seams="fast", steps=2)
    before = {name: p.clone() for name, p in trainer.trained.items()}
    trainer.train()
    assert all(row["grad_norm"] > 0 for row in record(trainer.folder)[0])
    assert all(not torch.equal(p, before[name]) for name, p in trainer.trained.items())


def test_other_adapters_are_packed_without_a_word(tiny):
    model = get_peft_model(tiny[0], IA3Config(task_type="CAUSAL_LM"))
    seams = fast(model, Config())
    assert isinstance(seams.sample, EngineSample) and isinstance(seams.update, PackedUpdate)
    assert seams.why_not is None


def test_another_model_type_is_said_once(tmp_path, capsys):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    trainer = GRPOTrainer(
        GPT2LMHeadModel(config), task(), Config(steps=2, prompts_per_step=2, group_size=4), tokenizer=tokenizer,
        folder=tmp_path / "run", live=False,
    )  # fmt: skip
    trainer.train()
    assert (
        capsys.readouterr().out.count(
            "A slower, plain way is taken, since the engine cannot sample: model_type"
        )
        == 1
    )
    assert trainer.step == 2


@pytest.mark.parametrize("seams", ["plain", "fast"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_masked_completions_leave_nothing_to_compute(seams, beta, tmp_path):
    """All are cut off, and a completion that is cut off is left out: a loss of 0, and weights that stay."""
    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(8)]
    own = from_rows("masked", rows, reward=letters, max_completion_tokens=2)
    trainer = make(
        tmp_path / "run",
        task=own,
        seams=seams,
        mask_truncated_completions=True,
        beta=beta,
        steps=2,
    )
    before = {name: p.clone() for name, p in trainer.trained.items()}
    trainer.train()
    rows = record(trainer.folder)[0]
    assert [row["completion_cut_off"] for row in rows] == [1.0, 1.0]
    assert [row["loss"] for row in rows] == [row["grad_norm"] for row in rows] == [0.0, 0.0]
    assert all(torch.equal(p, before[name]) for name, p in trainer.trained.items())
