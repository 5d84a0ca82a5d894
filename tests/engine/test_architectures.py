"""Architectures that no list names: proven equal at their first use, or left to the plain way with a reason."""

import json

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from benchmarks.architectures import (
    FAMILIES,
    alone,
    batch_of,
    gradient,
    off,
    random_batch,
    tiny,
    with_lora,
)
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine import _first_use as first_use
from grpo_kit.engine._decode import Decoder
from grpo_kit.engine._kv_cache import KVCache
from grpo_kit.engine._supported_models import is_tested, window_of
from grpo_kit.engine.cpu._layers import head_of
from grpo_kit.loop import Config
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models.token_lists import generate_rows, why_not_padded

PLAIN = {
    "lfm2": "kind conv have another state",
    "qwen3-next": "kind linear_attention have another state",
    "qwen3.5": "kind linear_attention have another state",
    "phi4-mini": "'longrope', which change as a sequence grows",
    "gpt2": "'gpt2' has no rotary positions",
}
FAMILIES = {
    name: kind
    for name, kind in FAMILIES.items()
    if name != "qwen3.5" or hasattr(transformers, "Qwen3_5TextConfig")
}
# transformers 5.0 has no Qwen3.5
PLAIN = {name: why for name, why in PLAIN.items() if name in FAMILIES}
FAST = [family for family in FAMILIES if family not in PLAIN]
HOW = GenerationConfig(
    max_new_tokens=12, do_sample=True, temperature=0.7, top_k=0, eos_token_id=[], pad_token_id=0
)


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """What is found at a first use is kept here."""
    monkeypatch.setattr(first_use, "cache_folder", lambda: tmp_path)
    return tmp_path / first_use.FILE


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("bucketed, lora", [(False, False), (True, False), (False, True)])
def test_the_engines_logprobs_are_those_of_the_models_forward_pass(family, bucketed, lora):
    """Rows are longer than the windows; bucketed is what a card runs."""
    model, batch = tiny(family), random_batch()
    model = with_lora(model) if lora else model
    engine = RolloutEngine(model)
    engine._decoder = Decoder(engine._decoder.base, bucketed=bucketed)
    assert RolloutEngine.unsupported(model, HOW) is None
    made = engine.generate(batch.prompt_ids, HOW, seed=0)
    with torch.no_grad():
        wanted = alone(model, batch_of(batch.prompt_ids, made.completion_ids), 0.7)
    assert off(made.policy_logprobs, wanted) < 1e-4


@pytest.mark.parametrize("family, why", PLAIN.items())
def test_what_shares_nothing_says_why(family, why):
    assert why in RolloutEngine.unsupported(tiny(family), HOW)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_score_as_each_row_alone(family):
    """GPT-2's positions are absolute: padding in front must not move them."""
    model, batch = tiny(family), random_batch()
    with torch.no_grad():
        assert (
            off(PaddedUpdate(Config()).logprobs(model, batch, 0.7), alone(model, batch, 0.7))
            < 1e-3
        )


SIZES = {
    "vocab_size": 500,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_attention_heads": 6, "intermediate_size": 64}
OLD = {"vocab_size": 500, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}
# model type: its sizes, does it hide padding? None: in its log-probabilities, not in its gradient
OTHERS = {
    "rwkv": (SIZES | {"context_length": 256, "attention_hidden_size": 48}, False),
    "xlstm": (SIZES | {"hidden_size": 128, "num_heads": 2, "num_blocks": 2}, False),
    "mamba": (SIZES | {"state_size": 8}, True),
    "mamba2": (SIZES | {"state_size": 8, "num_heads": 12, "head_dim": 8, "n_groups": 2, "chunk_size": 16}, True),
    "falcon_mamba": (SIZES | {"state_size": 8}, True),
    "recurrent_gemma": (SIZES | HEADS | {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 16}, None),
    "bloom": ({"vocab_size": 500, "hidden_size": 48, "n_layer": 2, "n_head": 6}, True),
    "mpt": ({"vocab_size": 500, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 256}, True),
    "falcon": (SIZES | {"num_attention_heads": 6, "alibi": True}, True),
    "opt": (SIZES | {"ffn_dim": 64, "num_attention_heads": 6, "word_embed_proj_dim": 48}, True),
    "ctrl": (OLD | {"dff": 64}, True),
    "gpt2": (OLD, True),
}  # fmt: skip


def other(kind):
    """A random model of that type, its weights large enough that padding shows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **OTHERS[kind][0])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(3 if weights.ndim > 1 else 1)
    return model.eval()


class Recurrent(torch.nn.Module):
    """A user's own: its forward takes tokens and nothing else."""

    config = PretrainedConfig()

    def __init__(self):
        super().__init__()
        self.embed, self.mix = (
            torch.nn.Embedding(500, 16),
            torch.nn.GRU(16, 16, batch_first=True),
        )
        self.head = torch.nn.Linear(16, 500)

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.head(self.mix(self.embed(input_ids))[0]))


class Deaf(Recurrent):
    """One that takes a mask and reads none of it."""

    def forward(self, input_ids, attention_mask=None, **others):
        return super().forward(input_ids)


def prompt_tuned(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(
            other(kind), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        ).eval()


PADDED = {kind: (lambda kind=kind: other(kind), hides) for kind, (_, hides) in OTHERS.items()} | {
    "own": (Recurrent, False), "deaf": (Deaf, False), "prompt-tuned gpt2": (lambda: prompt_tuned("gpt2"), False),
}  # fmt: skip


@torch.no_grad()
def one_by_one(model, batch):
    return [
        PaddedUpdate(Config()).logprobs(model, batch_of([prompt], [completion]), 0.7)[0]
        for prompt, completion in zip(batch.prompt_ids, batch.completion_ids, strict=True)
    ]


@pytest.mark.parametrize("kind", PADDED)
def test_what_hides_no_padding_gets_none(kind):
    """Log-probabilities, gradients and samples are those of each row alone; padding is taken where it is right."""
    make, hides = PADDED[kind]
    model, batch = make(), random_batch()
    assert (why_not_padded(model) is None) == (hides is not False)
    assert (why_not_padded(model, gradient=True) is None) == (hides is True)
    with torch.no_grad():
        wanted = one_by_one(model, batch)
        assert off(PaddedUpdate(Config()).logprobs(model, batch, 0.7), wanted) < 1e-4
        if kind in OTHERS:
            assert off(wanted, alone(model, batch, 0.7)) < 1e-4
    together, apart = (
        gradient(model, batch, PaddedUpdate(Config(micro_batch=size))) for size in (6, 1)
    )
    assert (together - apart).norm() < 1e-4 * apart.norm()
    if hasattr(model, "generate"):
        how = GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=[], pad_token_id=0
        )
        prompts = batch.prompt_ids[1::2]
        with torch.no_grad():
            written = [generate_rows(model, [prompt], how)[0] for prompt in prompts]
            assert generate_rows(model, prompts, how) == written


def test_padding_is_asked_for_once_and_only_where_lengths_differ():
    model, calls = other("rwkv"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    prompts, completions = [[5, 6, 7], [8, 9, 10]], [[11, 12], [13]]
    logprobs = PaddedUpdate(Config()).logprobs
    logprobs(model, batch_of(prompts, completions), 1.0)
    assert len(calls) == 1
    for asked in (3, 0):
        calls.clear()
        logprobs(model, batch_of([[5, 6], [8, 9, 10]], completions), 1.0)
        assert len(calls) == asked + 2
    model.train()
    assert why_not_padded(model) and model.training


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite", "qwen3-moe", "gpt-oss"])
def test_the_head_is_the_models_own_with_what_stands_behind_it(family):
    model = tiny(family)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = model.get_decoder()(ids).last_hidden_state[0].detach().requires_grad_()
    found = head_of(model)(hidden)
    assert torch.allclose(found, model(ids).logits[0], atol=1e-5)
    assert "forward" not in vars(model.get_decoder())  # the decoder is itself again
    found.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_tested_types_are_not_asked_and_others_once(kept, monkeypatch):
    calls, inner = [], RolloutEngine.generate
    monkeypatch.setattr(
        RolloutEngine, "generate", lambda self, *a, **k: calls.append(1) or inner(self, *a, **k)
    )
    assert (
        RolloutEngine.unsupported(tiny("llama3"), HOW) is None
        and not calls
        and not kept.exists()
    )
    model = tiny("gemma3")
    assert RolloutEngine.unsupported(model, HOW) is None and len(calls) == 1
    assert RolloutEngine.unsupported(model, HOW) is None and len(calls) == 1
    assert RolloutEngine.unsupported(tiny("gemma3", seed=1), HOW) is None and len(calls) == 1
    ((found,),) = json.loads(kept.read_text()).values()
    assert found["part"] == "engine" and found["outcome"] == "equal"
    assert (
        RolloutEngine.unsupported(tiny("gemma3", sliding_window=5), HOW) is None
        and len(calls) == 2
    )


def test_a_type_that_is_computed_wrongly_goes_the_plain_way(monkeypatch):
    """As if the engine did not know windows: rows must be longer than one for that to show."""
    monkeypatch.setattr(
        KVCache, "_biases", lambda self, window: (self._bias, self._suffix_bias)
    )
    why = RolloutEngine.unsupported(tiny("mistral"), HOW)
    assert why.startswith(
        "model_type 'mistral' was compared with its own forward pass: engine: differs"
    )
    with pytest.raises(ValueError, match="mistral"):
        RolloutEngine(tiny("mistral")).generate([[5, 6]], HOW)


class Own(LlamaForCausalLM):
    """A user's class with a known type's name, which does something else behind its head."""

    def forward(self, *args, **kwargs):
        made = super().forward(*args, **kwargs)
        made.logits = made.logits[..., torch.arange(made.logits.size(-1)).roll(1)]
        return made


class Other(LlamaForCausalLM):
    """One whose decoder is not all of it."""

    def forward(self, input_ids=None, **kwargs):
        if input_ids is None:
            return super().forward(**kwargs)
        return super().forward(input_ids, **kwargs, output_hidden_states=False) | {
            "logits": None
        }


def test_a_class_of_ones_own_is_compared_each_time_and_never_kept(kept):
    own = Own(tiny("llama3").config).eval()
    # its own head is called
    assert not is_tested(own) and RolloutEngine.unsupported(own, HOW) is None
    made = RolloutEngine(own).generate([[5, 6, 7]], HOW, seed=0)
    with torch.no_grad():
        assert (
            off(
                made.policy_logprobs,
                alone(own, batch_of([[5, 6, 7]], made.completion_ids), 0.7),
            )
            < 1e-4
        )
    other = Other(tiny("llama3").config).eval()
    assert "engine: failed" in RolloutEngine.unsupported(other, HOW)
    assert not kept.exists()


def test_known_types_with_windows_are_no_plain_layers():
    """Qwen2 knows windows, the plain functions for a CPU do not."""
    model = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert (
        window_of(model) == 8
        and not is_tested(model)
        and RolloutEngine.unsupported(model, HOW) is None
    )
    batch = random_batch()
    made = RolloutEngine(model).generate(batch.prompt_ids, HOW, seed=0)
    with torch.no_grad():
        wanted = alone(model, batch_of(batch.prompt_ids, made.completion_ids), 0.7)
    assert off(made.policy_logprobs, wanted) < 1e-4
