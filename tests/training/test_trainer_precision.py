"""Weights keep their dtype, sampling has no dropout, the reference is the model that was passed."""

import pytest
import torch
from tiny_run import data, letters, make
from trl import GRPOConfig

from grpo_kit import GRPOTrainer, profile
from grpo_kit.cuda import has_bf16
from grpo_kit.models import load_policy
from grpo_kit.profiles import PROFILES
from grpo_kit.training.precision import bf16_instructions, settle_precision


@pytest.mark.parametrize("which", ["plain", "kit"])
def test_continuous_batching_leaves_the_weights_in_float32(which, tmp_path):
    trainer = make(which, tmp_path, use_transformers_continuous_batching=True, bf16=True, max_steps=1)
    trainer.train()
    dtypes = {p.dtype for p in trainer.model.parameters()}
    assert dtypes == ({torch.float32} if which == "kit" else {torch.bfloat16})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_kept(dtype, tmp_path):
    model = load_policy("tiny-random", dtype=dtype, quiet=True)[0]
    trainer = make("kit", tmp_path, model=model, max_steps=2)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, dtype)}


def test_autocast_with_a_reference(tmp_path):
    """accelerate wraps the reference's forward then; the temperature must still reach its head."""
    trainer = make("kit", tmp_path, bf16=True, beta=0.1, max_steps=2, kit={"temperature": lambda p: 1.5 - p})
    trainer.train()
    assert [cell.cell_contents for cell in trainer.temperatures.heads] == [0.5, 0.5]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("which", ["plain", "kit"])
def test_no_lora_dropout_while_sampling_and_scoring(which, tmp_path):
    """Old log-probabilities must be those of the network that sampled; plain TRL drops half of it twice."""
    lora = {"lora_dropout": 0.5, "init_lora_weights": False}
    torch.manual_seed(0)
    model = load_policy("tiny-random", tuning="lora", lora=lora, quiet=True)[0]
    trainer = make(which, tmp_path, model=model, num_iterations=2, max_steps=2)
    modes, errors = set(), []
    dropout = next(m for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout) and m.p == 0.5)
    inner_generate, inner_score = trainer._generate_single_turn, trainer._generate_and_score_completions

    def generate(*args, **kwargs):
        hook = dropout.register_forward_hook(lambda module, *_: modes.add(module.training))
        try:
            return inner_generate(*args, **kwargs)
        finally:
            hook.remove()

    def score(inputs):
        batch = inner_score(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].size(1)
        trainer.model.eval()
        with torch.no_grad():
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        trainer.model.train()
        wanted = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
        errors.append((wanted - batch["old_per_token_logps"]).abs().max().item())
        if which == "kit":  # what was sampled from had no dropout either
            apart = (wanted - batch["sampling_per_token_logps"]) * batch["completion_mask"]
            errors.append(apart.abs().max().item())
        return batch

    trainer._generate_single_turn, trainer._generate_and_score_completions = generate, score
    trainer.train()
    assert trainer.model.training
    assert (
        modes <= {False} if which == "kit" else modes == {True}
    )  # the kit need not ask a module without effect
    assert (max(errors) < 1e-4) == (which == "kit")


@pytest.mark.parametrize("which", ["plain", "kit"])
def test_reference_is_the_model_that_was_passed(which, tmp_path):
    """A model changed in memory (trained, merged) has a path that leads to other weights."""
    model = load_policy("tiny-random", quiet=True)[0]
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    trainer = make(which, tmp_path / "run", model=model, beta=0.1, max_steps=2)
    trainer.train()
    first = next(r["kl"] for r in trainer.state.log_history if "kl" in r)
    assert (abs(first) < 1e-6) == (which == "kit")
    if which == "kit":
        later = [r["kl"] for r in trainer.state.log_history if "kl" in r][-1]
        assert later > 0  # the reference did not move along with the policy
        assert not any(p.requires_grad for p in trainer.ref_model.parameters())


def test_quantised_base_keeps_float32_adapters():
    """trl casts them to bfloat16; without a GPU only our half can be run."""
    from grpo_kit.training.restore import restore_dtypes

    model = load_policy("tiny-random", tuning="lora", quiet=True)[0]
    model.is_loaded_in_4bit = True
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    restore_dtypes(model, {})
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


FLAGS = "model name\t: amx_bf16\nflags\t\t: fpu vme {}amx_bf16_like\n"


@pytest.mark.parametrize(
    "flags, found",
    [
        ("amx_bf16 avx512_bf16 ", "amx_bf16"),
        ("avx512_bf16 ", "avx512_bf16"),
        ("avx512f amx_int8 ", None),  # tiles, but for integers only
    ],
)
def test_bf16_instructions_are_read_from_the_flags_as_words(tmp_path, flags, found):
    (tmp_path / "cpuinfo").write_text(FLAGS.format(flags))
    assert bf16_instructions(tmp_path / "cpuinfo") == found
    assert bf16_instructions(tmp_path / "no such file") is None


def test_trls_default_of_bf16_is_off_on_a_cpu_and_said_once(tmp_path, capsys):
    """GRPOConfig(use_cpu=True) has bf16=True, though nobody asked: the step is then computed as without it."""
    norms = []
    for number, more in enumerate([{}, {"bf16": False}]):
        sizes = {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 2,
        }
        args = GRPOConfig(str(tmp_path / str(number)), use_cpu=True, report_to="none", **sizes, **more)
        assert args.bf16 is not bool(more)
        model, tokenizer = load_policy("tiny-random", quiet=True)
        trainer = GRPOTrainer(model, letters, args, data(), processing_class=tokenizer, live=False)
        trainer.train()
        assert not trainer.args.bf16 and trainer.accelerator.mixed_precision == "no"
        norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
        assert capsys.readouterr().out.count("args.bf16 is now False") == (not more)
    assert norms[0] == norms[1] and len(norms[0]) == 2


@pytest.mark.parametrize(
    "flag, said", [("amx_bf16", "with AMX"), ("avx512_bf16", "AVX-512"), (None, "slower")]
)
def test_bf16_that_was_asked_for_is_obeyed_with_one_line(tmp_path, capsys, monkeypatch, flag, said):
    monkeypatch.setattr("grpo_kit.training.precision.bf16_instructions", lambda: flag)
    args = profile("smoke").grpo_config(tmp_path, bf16=True)
    settle_precision(args, quiet=False)
    out = capsys.readouterr().out
    assert args.bf16 and out.count("\n") == 1 and said in out and "cosine" in out
    settle_precision(args, quiet=True)
    assert capsys.readouterr().out == ""


def test_accelerates_own_variable_is_an_ask(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = GRPOConfig(str(tmp_path), use_cpu=True)
    settle_precision(args, quiet=True)
    assert args.bf16


def test_no_profile_turns_it_on_by_itself(tmp_path):
    for name in PROFILES:
        args = profile(name).grpo_config(tmp_path)
        assert args.bf16 == has_bf16()
