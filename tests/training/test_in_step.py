"""A sampler with weights of its own: given the trainer's after every change, and found out where it was not.

vLLM's place is taken by a copy of the model that is asked as trl asks vLLM; test_vllm.py asks vLLM itself.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_run import make, weights

from grpo_kit.models import base_model, load_policy
from grpo_kit.record.files import read_metrics
from grpo_kit.schedules import linear
from grpo_kit.training import checks, vllm_sampler
from grpo_kit.training.in_step import SamplerNotInStep
from grpo_kit.training.vllm_sampler import VllmSampler
from grpo_kit.training.vllm_worker import InStep, pack_tied_heads


class Copy(VllmSampler):
    """A second copy of the model; `reached` says which weights a sync reaches. It begins with none of the trainer's."""

    dtype = torch.float32
    reached = staticmethod(lambda name, sync: True)

    def _init_vllm(self):
        base = base_model(self.model)
        with torch.random.fork_rng():
            torch.manual_seed(5)  # none of the trainer's
            self.copy = type(base)(base.config).requires_grad_(False).eval()
        self.syncs, self.asked = 0, []

    def end_with(self, ids):
        self.ends = ids

    def sync_weights(self):
        self.syncs += 1
        own = dict(self.copy.named_parameters())
        for name, weight in self._iter_named_params():
            if self.reached(name, self.syncs):
                own[name].data.copy_(weight)
        self._synced = vllm_sampler.versions(self.model)

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        self.asked.append((self.temperature, num_generations, prompts))
        completions, logprobs = [], []
        for prompt in prompts:
            ids, scores = list(prompt), []
            while len(scores) < self.max_completion_length and not (scores and ids[-1] in self.ends):
                logits = self.copy(torch.tensor([ids])).logits[0, -1].double() / self.temperature
                ids.append(int(torch.multinomial(logits.softmax(-1), 1)))
                scores.append([logits.log_softmax(-1)[ids[-1]].item()])
            completions.append(ids[len(prompt) :])
            logprobs.append(scores)
        return prompts, completions, logprobs, None


@pytest.fixture
def sampled(monkeypatch, tmp_path):
    """sampled(reached=..., **make's) -> a trainer that a Copy samples for."""

    monkeypatch.setattr(checks, "find_spec", lambda name: name)  # a Copy needs no vllm

    def trainer(name="a", *, reached=Copy.reached, **given):
        monkeypatch.setattr(
            vllm_sampler, "VllmSampler", type("Stand", (Copy,), {"reached": staticmethod(reached)})
        )
        return make("kit", tmp_path / name, use_vllm=True, max_completion_length=4, **given)

    return trainer


def gaps(trainer):
    return list(read_metrics(trainer.args.output_dir)["rollout/logprob_gap"])


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_in_step_after_every_update_at_the_schedules_temperature(tuning, sampled):
    trainer = sampled(tuning=tuning, kit={"temperature": linear(1.3, 0.7)}, learning_rate=3e-2)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    sampler = trainer.vllm_generation
    assert sampler.syncs == 4 and max(gaps(trainer)) < 1e-5
    assert [round(t, 2) for t, *_ in sampler.asked] == [1.3, 1.1, 0.9, 0.7]
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(weight, now[name]) for name, weight in frozen.items()), "merging left its mark"
    assert bool(frozen) == (tuning == "lora")


def head_once(name, sync):
    return sync == 1 or "embed_tokens" not in name


@pytest.mark.parametrize("correction", [True, False])
def test_a_matrix_that_a_later_sync_does_not_reach_stops_the_run_before_it_is_trained_on(correction, sampled):
    trainer = sampled(reached=head_once, learning_rate=3e-2, vllm_importance_sampling_correction=correction)
    with pytest.raises(SamplerNotInStep, match="weights are not the trainer's.* at the rollout after step 1"):
        trainer.train()
    assert trainer.state.global_step == 1 and trainer.interrupted is False
    trainer.vllm_generation.reached = lambda name, sync: True
    trainer.train()  # saved where it stopped; the sync is whole again
    assert trainer.state.global_step == 4 and max(gaps(trainer)) < 1e-5


def test_a_sampler_that_never_got_a_matrix_is_found_at_the_first_rollout(sampled):
    trainer = sampled(reached=lambda name, sync: "embed_tokens" not in name)
    with pytest.raises(SamplerNotInStep, match="at the first rollout"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_weights_that_change_without_a_step_are_given_too(sampled):
    trainer = sampled(max_steps=2)
    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    syncs = trainer.vllm_generation.syncs
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight.mul_(3)
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.vllm_generation.syncs == syncs + 1
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.vllm_generation.syncs == syncs + 1


def test_a_resumed_run_ends_in_the_same_steps(sampled):
    trainer = sampled(max_steps=3, save_strategy="steps", save_steps=2)
    trainer.train()
    again = sampled(max_steps=3, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert again.state.global_step == 3 and max(gaps(again)) < 1e-5


def test_the_packed_update_is_trls_with_its_correction(sampled):
    """A sampler that is off on purpose, within limits, so that the weights of completions are not 1."""
    runs = []
    for pack in (True, False):

        def rough(name, sync):
            return sync == 1 or "embed_tokens" not in name

        torch.manual_seed(1)
        trainer = sampled(
            str(pack), reached=rough, max_steps=2, optim="sgd", learning_rate=1.0, kit={"pack": pack}
        )
        trainer.sampling._in_step.judge = lambda output: 0.0
        trainer.train()
        ratios = [row["sampling/importance_sampling_ratio/max"] for row in trainer.state.log_history[:2]]
        assert ratios[0] == pytest.approx(1, abs=1e-4) and ratios[1] > 1.001
        runs.append(weights(trainer))
    assert max((runs[0][n] - runs[1][n]).abs().max() for n in runs[0]) < 1e-5


def test_the_sum_is_pefts_and_the_base_stays_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        model = load_policy("tiny-random", dtype=dtype, quiet=True)[0]
        before = {name: p.clone() for name, p in model.named_parameters()}
        config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", use_dora=True)
        adapted = get_peft_model(model, config)
        sampler = VllmSampler.__new__(VllmSampler)
        sampler.model, sampler._dist = adapted, type("", (), {"is_fsdp": False, "is_zero3": False})
        made = {name: weight.clone() for name, weight in sampler._iter_named_params()}
        for name, weight in sampler._iter_named_params():  # a second time: nothing was left behind
            assert torch.equal(weight, made[name])
        assert set(made) == set(before)
        for name, p in adapted.named_parameters():
            if "lora_" not in name:
                short = name.removeprefix("base_model.model.").replace(".base_layer", "")
                assert torch.equal(p, before[short]) and p.dtype == dtype
        with torch.no_grad():
            whole = adapted.float().merge_and_unload().state_dict()
        assert all((made[n].float() - whole[n]).abs().max() < 1e-5 for n in made)


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.quant_method, self.packed = weight, self, None

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()


def test_a_tied_head_is_packed_again_and_nothing_else():
    weight, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    model = torch.nn.ModuleDict({"embed": Layer(weight), "linear": Layer(other), "head": Layer(weight)})
    pack_tied_heads(model)
    assert [model[name].packed is not None for name in model] == [False, False, True]


def test_the_server_loads_a_folder_and_then_packs():
    done = []
    worker = type("Worker", (InStep,), {})()
    worker.reload_weights = lambda weights_path: done.append(weights_path)
    worker.model_runner = type(
        "", (), {"get_model": staticmethod(lambda: done.append("model") or torch.nn.Module())}
    )
    worker.load_in_step("folder")
    assert done == ["folder", "model"]


def test_a_base_of_four_bits_is_refused():
    model = load_policy("tiny-random", tuning="lora", quiet=True)[0]
    base_model(model).is_loaded_in_4bit = True
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.model = model
    with pytest.raises(ValueError, match="4-bit or 8-bit base would be rounded anew"):
        sampler._init_vllm()
