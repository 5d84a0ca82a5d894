"""vLLM as the loop's sampler. The first tests need none; the others run vLLM's CPU build, colocated and as a server.

Those take minutes, in an environment of its own (`make vllm`), and are skipped elsewhere. A tied and an untied Llama of
2 layers with heads of 64, which vLLM's CPU kernels take; weights, prompts and temperature are the trainer's, and a load
that does not reach the tied head is found out.
"""

import copy
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import few_words
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "loop"))
import tiny_loop_episodes  # noqa: E402
from loop_runs import make, press_stop, record, same, weights  # noqa: E402

from examples.older_weights import OlderWeights
from grpo_kit.loop import Config
from grpo_kit.loop.batch import Batch, generate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.more.bridges import _vllm_engines as vllm_engines
from grpo_kit.more.bridges._vllm_engines import EXTENSION
from grpo_kit.more.bridges.vllm import SamplerNotInStep, VllmSample, _summed_weights
from grpo_kit.more.episodes._episode_sample import EpisodeSample
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.schedules import linear

runs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None or not os.environ.get("KIT_SLOW_TESTS"),
    reason="needs vllm (make vllm) and minutes; KIT_SLOW_TESTS=1 runs it",
)


tokenizer = few_words.tokenizer


def small(tied, *, lora=False):
    ids = {
        f"{kind}_token_id": getattr(tokenizer(), f"{kind}_token_id")
        for kind in ("bos", "eos", "pad")
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied, **ids,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def run(folder, model, sample, **options):
    """A trainer of four steps whose sampler this is."""
    trainer = make(folder, model=model, tokenizer=tokenizer(), **options)
    trainer.sample = sample
    return trainer


def gaps(trainer):
    return read_metrics(trainer.folder)["rollout/logprob_gap"].tolist()


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- without vLLM -------------------------------------------------------------------------------------------------


def test_adapters_are_added_up_in_float32_and_the_base_stays_bit_for_bit():
    model = small(True, lora=True).to(torch.bfloat16)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn_like(p, dtype=torch.float32) / 10
    before, state = copies(model), model.state_dict()
    found = {name: weight.clone() for name, weight in _summed_weights(model)}
    assert same(before, copies(model)) and not any(
        m.merged for m in model.modules() if hasattr(m, "merged")
    )
    assert found.keys() == dict(small(True).named_parameters()).keys()
    stem = "base_model.model.model.layers.1.mlp.up_proj"
    a, b = (state[f"{stem}.lora_{x}.default.weight"] for x in "AB")
    base = state[f"{stem}.base_layer.weight"]
    wanted = base.float() + 8 / 4 * b @ a  # peft's lora_alpha is 8
    assert torch.allclose(found["model.layers.1.mlp.up_proj.weight"], wanted, atol=1e-6)
    rounded = wanted.to(torch.bfloat16).float()
    # what a merge into the base would leave
    assert not torch.allclose(rounded, wanted, atol=1e-6)
    plain = small(False)
    assert all(weight is not None for _, weight in _summed_weights(plain))
    assert [name for name, _ in _summed_weights(plain)] == [
        name for name, _ in plain.named_parameters()
    ]


class StandIn:
    """An engine with weights of its own; reaches: the loads that arrive."""

    dtype = torch.float32

    def __init__(self, model, reaches=lambda count: True):
        self.model, self.reaches, self.loads = copy.deepcopy(model), reaches, 0

    def load(self, given):
        self.loads += 1
        if self.reaches(self.loads):
            self.model.load_state_dict(
                {name: weight.clone() for name, weight in given}, strict=False
            )

    @torch.no_grad()
    def complete(self, prompts, how, seeds):
        made = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            draw, ids, logprobs = torch.Generator().manual_seed(seed), [], []
            while len(ids) < how["max_tokens"] and not (
                ids and ids[-1] in how["stop_token_ids"]
            ):
                logits = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1]
                table = (logits / how["temperature"]).log_softmax(-1)
                ids.append(int(torch.multinomial(table.exp(), 1, generator=draw)))
                logprobs.append(table[ids[-1]].item())
            made.append((ids, logprobs))
        return made


def stood_in(model, **options):
    sample = VllmSample("http://stands.in")
    sample.engine = StandIn(model, **options)
    return sample


def test_weights_are_given_after_every_update_and_a_load_that_reaches_nothing_stops_the_run(
    tmp_path,
):
    model = small(True)
    trainer = run(tmp_path / "run", model, stood_in(model, reaches=lambda count: count != 3))
    before = copies(model)
    with pytest.raises(
        SamplerNotInStep, match=r"(?s)the sampler's weights are not the trainer's.*in step 3, "
    ):
        trainer.train()
    assert trainer.step == 2 and (tmp_path / "run/checkpoint-2").exists()
    at_the_stop = copies(model)
    trainer.sample._loaded = None
    trainer.train()  # the next load arrives
    assert max(gaps(trainer)) < 1e-5 and len(gaps(trainer)) == 4
    assert trainer.sample.engine.loads == 5
    assert (
        not same(before, at_the_stop)
        and read_metrics(trainer.folder)["rollout/sync_seconds"].notna().all()
    )
    untouched = run(tmp_path / "untouched", small(True), stood_in(small(True)))
    untouched.train()
    assert same(weights(untouched), weights(trainer))


def test_groups_drawn_anew_need_no_second_load_and_what_is_set_by_hand_one(tmp_path):
    model = small(True)
    sample = stood_in(model)
    trainer = run(tmp_path / "run", model, sample)
    given = (
        trainer.tokenizer,
        trainer.task,
        trainer.task.train[:2],
        trainer.config,
        trainer.config.at(0),
    )
    sample(model, *given)
    sample(model, *given)
    assert sample.engine.loads == 1
    model.model.norm.weight.data.mul_(2)  # in a way that torch does not count
    sample(model, *given)
    assert sample.engine.loads == 2


def test_a_cut_distribution_is_not_measured(tmp_path):
    """vLLM's log-probabilities are then of what was left to choose from; they are left out."""
    model = small(True)
    trainer = run(tmp_path / "run", model, stood_in(model), top_k=50, steps=1)
    trainer.train()
    assert "rollout/logprob_gap" not in read_metrics(trainer.folder)
    assert read_completions(trainer.folder)["logprobs"].isna().all()


def test_older_weights_go_through_it(tmp_path):
    model = small(True)
    trainer = run(tmp_path / "run", model, None)
    trainer.sample = OlderWeights(stood_in(model), sync_every=2)
    trainer._sample_state = trainer.sample.state()
    trainer.train()
    assert read_metrics(trainer.folder)["rollout/age"].tolist() == [0, 1, 0, 1]


def test_a_token_weighs_by_the_ratio_to_the_sampler_up_to_the_cap():
    """By hand: weights 0.5, 2 (the cap, of 4) and 1 on advantages 1, 1 and -1."""
    half, four = torch.tensor(2.0).log().item(), -torch.tensor(4.0).log().item()
    batch = Batch(
        rows=[{}] * 2, groups=[0, 0], prompt_ids=[[1], [1]], completion_ids=[[5, 6], [7]], completions=["", ""],
        cut_off=[False] * 2, sampler_logprobs=[[-1 + half, -1 + four], [-1.0]], advantages=[1.0, -1.0],
    )  # fmt: skip
    config = Config(importance_sampling_cap=2)
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], requires_grad=True)
    PolicyLoss(batch, config, config.at(0))([0, 1], logprobs, torch.zeros(2, 2)).backward()
    assert torch.allclose(logprobs.grad, torch.tensor([[-0.5, -2.0], [1.0, 0.0]]) / 3)
    plain = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], requires_grad=True)
    config.importance_sampling_cap = None
    PolicyLoss(batch, config, config.at(0))([0, 1], plain, torch.zeros(2, 2)).backward()
    assert torch.allclose(plain.grad, torch.tensor([[-1.0, -1.0], [1.0, 0.0]]) / 3)
    with pytest.raises(ValueError, match="importance_sampling_cap=0"):
        Config(importance_sampling_cap=0)


def test_what_cannot_be_is_refused_in_words(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="max_model_len: arguments of a vLLM in this process"):
        VllmSample("http://localhost:8000", max_model_len=128)
    if find_spec("vllm") is None:
        with pytest.raises(ValueError, match="vllm is not installed"):
            VllmSample()
    model = small(True)
    nobody = VllmSample("http://127.0.0.1:9", server_seconds=0.1)
    with pytest.raises(
        ValueError, match=r"no vLLM server answers at 'http://127.0.0.1:9' within 0.1 s"
    ):
        run(tmp_path / "a", model, nobody).train()
    model.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="4-bit or 8-bit base would be rounded anew"):
        run(tmp_path / "b", model, stood_in(model)).train()


# ---- vLLM in this process -----------------------------------------------------------------------------------------


def colocated(**engine):
    return VllmSample(**{"gpu_memory_utilization": 0.15, "max_model_len": 128} | engine)


@runs_vllm
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_colocated_it_has_the_trainers_weights_after_every_update(tied, lora, tmp_path):
    model, sample = small(tied, lora=lora), colocated()
    before = copies(model)
    trainer = run(tmp_path / "run", model, sample, temperature=linear(1.3, 0.7))
    asked = []

    class Ask(Hook):
        def before_step(self, trainer):
            if sample.engine is not None and not asked:
                inner = sample.engine.complete
                sample.engine.complete = lambda *given: asked.append(given) or inner(*given)

    trainer.hooks.append(Ask())
    trainer.train()
    moved = max((p.detach() - before[n]).abs().max() for n, p in model.named_parameters())
    assert moved > 1e-3 and len(gaps(trainer)) == 4 and max(gaps(trainer)) < 1e-4
    if lora:
        assert all(
            torch.equal(p, before[n]) for n, p in model.named_parameters() if "lora_" not in n
        )
    assert [round(how["temperature"], 2) for _, how, _ in asked] == [1.1, 0.9, 0.7]
    assert all(how["max_tokens"] == 6 for _, how, _ in asked)
    texts = read_completions(trainer.folder)["prompt"]
    assert {tokenizer().decode(ids) for ids in asked[0][0]} <= set(texts)


@runs_vllm
def test_a_tied_head_that_is_left_as_it_was_stops_the_run(tmp_path, monkeypatch):
    """vLLM's own reload alone: what a tied model had before this was mended."""
    monkeypatch.setattr(vllm_engines, "pack_tied_heads", lambda model: None)
    with pytest.raises(SamplerNotInStep, match="the sampler's weights are not the trainer's"):
        run(tmp_path / "run", small(True), colocated()).train()


@runs_vllm
def test_stopped_inside_vllm_and_gone_on_it_is_the_run_that_was_never_stopped(tmp_path):
    """Two stops: after a step, and while vLLM writes; then a new trainer goes on with what was saved."""
    sample = colocated()
    untouched = run(tmp_path / "a", small(True), sample, steps=5, max_completion_tokens=40)
    untouched.train()
    state = torch.get_rng_state()

    class Press(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 3:
                press_stop()

    engine, count = sample.engine.llm.llm_engine, []
    step = engine.step

    def step_and_press():
        count.append(1)
        if len(count) == 50:  # inside the second rollout
            press_stop()
        return step()

    engine.step = step_and_press
    trainer = run(
        tmp_path / "b", small(True), sample, steps=5, max_completion_tokens=40, hooks=[Press()]
    )
    for done in (1, 3):
        with pytest.raises(Stopped, match=f"after step {done} of 5"):
            trainer.train()
        assert not engine.has_unfinished_requests()
    second = run(tmp_path / "b", small(True), colocated(), steps=5, max_completion_tokens=40)
    second.train(resume=True)
    assert same(weights(untouched), weights(second)) and record(tmp_path / "a") == record(
        tmp_path / "b"
    )
    assert torch.equal(state, torch.get_rng_state())


@runs_vllm
def test_it_ends_where_the_trainer_says(tmp_path):
    model = small(True)
    # of 49,152 tokens: most completions end early
    model.generation_config.eos_token_id = list(range(100, 8000))
    trainer = run(tmp_path / "run", model, colocated(), max_completion_tokens=12)
    trainer.train()
    assert (
        0 < read_metrics(trainer.folder)["completion_cut_off"].mean() < 1
        and max(gaps(trainer)) < 1e-4
    )
    given = (
        model,
        tokenizer(),
        trainer.task,
        trainer.task.train[:2],
        trainer.config,
        trainer.config.at(0),
    )
    batch = trainer.sample(*given)
    for ids, cut in zip(batch.completion_ids, batch.cut_off, strict=True):
        assert not any(100 <= i < 8000 for i in ids[:-1]) and cut == (not 100 <= ids[-1] < 8000)


@runs_vllm
def test_its_own_log_probabilities_are_those_of_a_padded_forward(tmp_path):
    model = small(False)
    trainer = run(tmp_path / "run", model, colocated())
    given = (
        model,
        tokenizer(),
        trainer.task,
        trainer.task.train[:2],
        trainer.config,
        trainer.config.at(0),
    )
    batch = trainer.sample(*given)
    wanted = PaddedUpdate(trainer.config).logprobs(model, batch, 1.0)
    for found, row in zip(batch.sampler_logprobs, wanted.tolist(), strict=True):
        assert found == pytest.approx(row[: len(found)], abs=1e-4)
    # each has a seed of its own
    assert len({tuple(ids) for ids in batch.completion_ids}) == len(batch)
    assert batch.prompt_ids == generate(*given).prompt_ids


@runs_vllm
def test_episodes_play_through_it(tmp_path):
    model = small(True)
    model.config.max_position_embeddings = 2048
    sample = EpisodeSample(colocated(max_model_len=1024).turns)
    ours = tiny_loop_episodes.make(tmp_path / "ours", seams="plain", sample=sample)
    ours = type(ours)(
        model,
        ours.task,
        ours.config,
        tokenizer=ours.tokenizer,
        folder=tmp_path / "ours",
        sample=sample,
    )
    ours.train()
    assert max(gaps(ours)) < 1e-4 and read_metrics(ours.folder)["episodes/turns"].gt(1).all()


@runs_vllm
def test_what_vllm_cannot_do_is_said(tmp_path):
    with pytest.raises(
        ValueError, match="(?s)vLLM cannot start with this model.*leave sample out"
    ):
        # longer than the model can be; what else it refuses, such as heads of 8, depends on the CPU
        run(tmp_path / "a", small(True), colocated(max_model_len=10**7)).train()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


# ---- vLLM as a server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """served(tied, *more) -> the address of a server of that model's weights of another seed."""
    running = []

    def serve(tied, *more):
        folder = tmp_path_factory.mktemp("served")
        small(tied).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.15",
            "--max-model-len", "128", "--logprobs-mode", "processed_logprobs", *more,
        ]  # fmt: skip
        log = open(folder / "log.txt", "w")  # noqa: SIM115
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        running.append(
            subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        )
        print("log of the server:", log.name)
        return f"http://127.0.0.1:{port}"

    yield serve
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@runs_vllm
def test_a_server_has_the_trainers_weights_after_every_update(served, tmp_path):
    url, begin = served(True, "--worker-extension-cls", EXTENSION), time.monotonic()
    (tmp_path / "through").mkdir()
    sample = VllmSample(url, through=str(tmp_path / "through"), server_seconds=400)
    model = small(True)
    before = copies(model)
    trainer = run(tmp_path / "run", model, sample, temperature=linear(1.3, 0.7))
    trainer.train()
    print(f"server up and four steps done after {time.monotonic() - begin:.0f} s")
    assert max((p.detach() - before[n]).abs().max() for n, p in model.named_parameters()) > 1e-3
    assert len(gaps(trainer)) == 4 and max(gaps(trainer)) < 1e-4
    assert not list((tmp_path / "through").iterdir())
    adapted = run(tmp_path / "lora", small(True, lora=True), sample)
    adapted.train()
    assert max(gaps(adapted)) < 1e-4


@runs_vllm
def test_a_server_without_what_weights_need_is_refused(served, tmp_path):
    sample = VllmSample(served(False), server_seconds=400)
    with pytest.raises(ValueError, match=f"with --worker-extension-cls {EXTENSION}"):
        run(tmp_path / "run", small(False), sample).train()
