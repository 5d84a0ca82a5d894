"""vLLM itself, colocated and as a server; minutes on a CPU, in an environment of its own (`make vllm`).

Skipped where vllm is not installed. A tied and an untied Llama of 2 layers with heads of 64, which vLLM's CPU kernels
take; weights, prompts and temperature are the trainer's, and a sync that does not reach the tied head is found out.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from tiny_run import make
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.schedules import linear
from grpo_kit.training import vllm_sampler
from grpo_kit.training.in_step import SamplerNotInStep
from grpo_kit.training.vllm_worker import InStep

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None or not os.environ.get("KIT_SLOW_TESTS"),
    reason="needs vllm (make vllm) and minutes; KIT_SLOW_TESTS=1 runs it",
)
COLOCATED = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.15, "vllm_max_model_length": 128}


def small(tied, *, lora=False):
    tokenizer = load_policy("tiny-random", quiet=True)[1]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def measured(trainer, name="rollout/logprob_gap"):
    return list(read_metrics(trainer.args.output_dir)[name])


def moved(trainer, before):
    return max((p.detach() - before[n]).abs().max() for n, p in trainer.model.named_parameters())


def copies(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [False, True])
def test_colocated_it_has_the_trainers_weights_after_every_update(tied, lora, tmp_path):
    trainer = make(
        "kit", tmp_path / "run", model=small(tied, lora=lora), max_steps=4, learning_rate=1e-2,
        kit={"rollout": "vllm", "temperature": linear(1.3, 0.7)}, **COLOCATED,
    )  # fmt: skip
    before = copies(trainer)
    asked = []
    inner = trainer.vllm_generation.llm.generate

    def generate(prompts, sampling_params, **given):
        asked.append((sampling_params, [p["prompt_token_ids"] for p in prompts]))
        return inner(prompts, sampling_params=sampling_params, **given)

    trainer.vllm_generation.llm.generate = generate
    trainer.train()
    assert moved(trainer, before) > 1e-3 and max(measured(trainer)) < 1e-4
    if lora:
        assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if "lora_" not in n)
    assert [round(params.temperature, 2) for params, _ in asked] == [1.3, 1.1, 0.9, 0.7]
    assert all(
        params.max_tokens == 6 and trainer.eos_token_ids == params.stop_token_ids for params, _ in asked
    )
    texts = read_completions(trainer.args.output_dir)["prompt"]
    tokenizer = trainer.processing_class
    assert {tokenizer.decode(ids) for ids in asked[0][1]} <= set(texts)


def test_a_tied_head_that_is_left_as_it_was_stops_the_run(tmp_path, monkeypatch):
    """vLLM's own reload alone: what a tied model had before this was mended."""
    monkeypatch.setattr(vllm_sampler, "pack_tied_heads", lambda model: None)
    trainer = make(
        "kit", tmp_path / "run", model=small(True), max_steps=4, learning_rate=1e-2, kit={"rollout": "vllm"},
        **COLOCATED,
    )  # fmt: skip
    with pytest.raises(SamplerNotInStep, match="the sampler's weights are not the trainer's"):
        trainer.train()


def test_it_ends_where_the_trainer_says_and_is_evaluated_stopped_and_gone_on_with(tmp_path):
    model = small(True)
    ends = list(range(100, 8000))  # of 49,152 tokens: most completions end early
    model.generation_config.eos_token_id = ends
    rows = make("kit", tmp_path / "rows", max_steps=1).train_dataset
    trainer = make(
        "kit", tmp_path / "run", model=model, max_steps=4, max_completion_length=12,
        eval_dataset=rows.select(range(4)), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        kit={"rollout": "vllm", "eval_temperature": 0.5}, **COLOCATED,
    )  # fmt: skip
    inner, pressed = trainer._calculate_rewards, []

    def press(*args, **kwargs):
        if trainer.state.global_step == 2 and trainer.model.training and not pressed:
            pressed.append(True)  # first: the signal may be heard inside os.kill
            os.kill(os.getpid(), signal.SIGINT)
        return inner(*args, **kwargs)

    trainer._calculate_rewards = press
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == 2
    trainer.train()
    table = read_metrics(trainer.args.output_dir)
    assert list(table["step"]) == [1, 2, 3, 4] and table["rollout/logprob_gap"].max() < 1e-4
    assert table["eval/reward"].notna().sum() == 2
    completions = read_completions(trainer.args.output_dir)
    assert 0 < table["completion_cut_off"].mean() < 1 and len(completions) == 32


def test_what_vllm_cannot_do_is_said(tmp_path):
    with pytest.raises(ValueError, match="(?s)vLLM cannot start with this model.*use rollout='kit'"):
        # longer than the model can be; what else it refuses, such as heads of 8, depends on the CPU
        make("kit", tmp_path / "a", kit={"rollout": "vllm"}, **COLOCATED | {"vllm_max_model_length": 10**7})
    with pytest.raises(ValueError, match="stop_strings, which vLLM's SamplingParams does not know"):
        make(
            "kit", tmp_path / "b", model=small(True), kit={"rollout": "vllm"},
            generation_kwargs={"stop_strings": ["x"]}, **COLOCATED,
        )  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """served(tied, extended) -> the address of a server of that model's weights of another seed."""
    running = []

    def serve(tied, extended):
        folder = tmp_path_factory.mktemp("served")
        small(tied).save_pretrained(folder)
        load_policy("tiny-random", quiet=True)[1].save_pretrained(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.15",
            "--max-model-len", "128", "--logprobs-mode", "processed_logprobs",
        ]  # fmt: skip
        if extended:
            command += ["--worker-extension-cls", f"{InStep.__module__}.{InStep.__qualname__}"]
        log = open(folder / "log.txt", "w")  # noqa: SIM115
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
        print("log of the server:", log.name)
        return f"http://127.0.0.1:{port}"

    yield serve
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def by_server(folder, url, model, **given):
    where = {"vllm_server_base_url": url, "vllm_server_timeout": 400, **given}
    return make(
        "kit",
        folder,
        model=model,
        max_steps=3,
        learning_rate=1e-2,
        use_vllm=True,
        vllm_mode="server",
        **where,
    )


def test_a_server_of_a_tied_model_has_the_trainers_weights_after_every_update(served, tmp_path):
    url, begin = served(True, True), time.monotonic()
    trainer = by_server(tmp_path / "run", url, small(True), kit={"temperature": linear(1.3, 0.7)})
    print(f"server up after {time.monotonic() - begin:.0f} s")
    before = copies(trainer)
    trainer.train()
    assert trainer.rollout == "vllm" and moved(trainer, before) > 1e-3 and max(measured(trainer)) < 1e-4
    assert not list((tmp_path / "run").glob("for_vllm_*"))
    adapted = by_server(tmp_path / "lora", url, small(True, lora=True))
    adapted.train()
    assert max(measured(adapted)) < 1e-4
    with pytest.raises(ValueError, match="vLLM cannot be used as a server.*can't be reached"):
        by_server(tmp_path / "nobody", "http://127.0.0.1:9", small(True), vllm_server_timeout=1)


def test_a_server_without_the_extension_takes_untied_models_only(served, tmp_path):
    url = served(False, False)
    trainer = by_server(tmp_path / "run", url, small(False))
    trainer.train()
    assert max(measured(trainer)) < 1e-4
    with pytest.raises(ValueError, match="--worker-extension-cls grpo_kit.training.vllm_worker.InStep"):
        by_server(tmp_path / "tied", url, small(True))
