"""What is exported is what was trained: weights by hand, read back by transformers, and refused where it is not."""

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import few_words
import pytest
import torch
from loop_runs import make
from peft import AutoPeftModelForCausalLM
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

import grpo_kit.more.export as exporting
from grpo_kit import linear, load_policy, tasks
from grpo_kit.models._adapters import add_adapters
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.export import ExportError, export, verify
from grpo_kit.more.export import _write as write
from grpo_kit.more.export._gguf_writer import write_gguf
from grpo_kit.more.export._write import share_moved, whole_model
from grpo_kit.more.export.export import _questions
from grpo_kit.more.export.model_card import license_of

BASE = str(few_words.folder())
TASK = tasks.largest(n_train=8, n_held_out=6)


def adapted(seed=0, base=BASE, **lora):
    """The tiny model with adapters that say something."""
    model, tokenizer = load_policy(base, tuning="lora", lora=lora or None, quiet=True)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    return model, tokenizer


def scores(model, tokenizer, text="Which number is the largest: 1, 2, 3?"):
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt")).logits[0].float()


def test_merged_lora_proves_itself(tmp_path):
    model, tokenizer = adapted()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    made = export(model, tokenizer, tmp_path / "out", task=TASK, quant="f32", temperature=0.7)
    proof = made.proof
    assert (
        proof.prompts_same == proof.questions == 6
        and proof.kl < 1e-6
        and proof.same_answers == 1
    )
    assert proof.comparison.base.n == 6 and proof.comparison.difference["strict"].value == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), (
        "the model stays as it is"
    )
    # Read by transformers alone, as anybody would.
    theirs = AutoModelForCausalLM.from_pretrained(made.folder)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert torch.allclose(scores(theirs, tokenizer), scores(model, tokenizer), atol=1e-5)
    settings = theirs.generation_config
    assert (
        settings.temperature == 0.7
        and settings.do_sample
        and settings.eos_token_id == [tokenizer.eos_token_id]
    )
    assert settings.max_new_tokens == TASK.max_completion_tokens
    asked = [{"role": "user", "content": TASK.held_out[0]["question"]}]
    text = AutoTokenizer.from_pretrained(made.folder).apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert text == TASK.render(tokenizer, TASK.held_out[:1])[0] and text.endswith("<answer>")
    report = json.loads((made.folder / "export.json").read_text())
    assert report["proof"]["objections"] == [] and report["base"] == BASE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"], "nothing is left beside it"
    assert oct(made.folder.stat().st_mode) == oct(
        (tmp_path / "out").parent.stat().st_mode | 0o55
    )


def test_each_slow_part_is_said_as_it_begins(tmp_path, capsys, monkeypatch):
    model, tokenizer = adapted()
    read_back = verify._read_back

    def said_before(request):
        said.append(capsys.readouterr().out)
        return read_back(request)

    said = []
    monkeypatch.setattr(verify, "_read_back", said_before)
    made = export(model, tokenizer, tmp_path / "out", task=TASK, quant="f32", rows=2)
    files = [
        path for path in made.folder.iterdir() if path.name not in ("README.md", "export.json")
    ]
    at_most = sum(p.numel() for p in model.parameters()) * 4 / 1e6 + 50
    assert said == [
        f"export: writing merged, f32, at most {at_most:,.0f} MB\n"
        f"export: wrote {len(files)} files, {made.bytes / 1e6:,.0f} MB\n"
        "export: the trained model answers 2 questions\n"
        "export: a fresh process reads the export and answers them\n"
    ]
    assert capsys.readouterr().out == f"export: done, in {made.folder}\n"


@pytest.mark.parametrize(
    "lora", [{}, {"use_dora": True}, {"use_rslora": True, "r": 4}], ids=str
)
def test_adapters_are_added_up_in_float32(lora):
    """By hand where it is a sum: the base's weight + scaling * B A."""
    model, tokenizer = adapted(**lora)
    whole = whole_model(model)
    assert not hasattr(whole, "peft_config")
    assert torch.allclose(scores(whole, tokenizer), scores(model, tokenizer), atol=1e-5)
    if "use_dora" in lora:
        return
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    delta = (
        layer.lora_B["default"].weight
        @ layer.lora_A["default"].weight
        * layer.scaling["default"]
    )
    expected = layer.base_layer.weight + delta
    assert torch.allclose(whole.model.layers[0].self_attn.q_proj.weight, expected, atol=1e-6)


def test_a_base_in_bfloat16_is_added_up_in_float32():
    model, tokenizer = load_policy(BASE, tuning="lora", dtype="bfloat16", quiet=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 1e-5)  # lost in a sum of bfloat16
    whole = whole_model(model)
    base = model.get_base_model().model.layers[1].mlp.up_proj
    merged = whole.model.layers[1].mlp.up_proj.weight
    assert merged.dtype == torch.float32
    delta = merged - base.base_layer.weight.float()
    expected = (
        base.lora_B["default"].weight @ base.lora_A["default"].weight * base.scaling["default"]
    )
    assert torch.allclose(delta, expected.float(), atol=1e-8) and expected.abs().max() > 0
    rounded = share_moved(model, whole, torch.bfloat16)
    assert rounded < 0.5 < share_moved(model, whole, torch.float32), (
        "what bfloat16 would leave of it"
    )


@pytest.fixture(scope="module")
def thousand():
    """A tokenizer of a thousand words: a GGUF holds every token and merge, one by one, which is slow."""
    return few_words.tokenizer(1000)


def of_few_words(kind, tokenizer):
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2,
        tie_word_embeddings=kind != "qwen3",
    )  # fmt: skip
    # transformers reads no head size of Qwen3's out of a GGUF: it takes 128, which all of Qwen's own have.
    config = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": partial(Qwen3Config, head_dim=128),
    }[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**sizes))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_is_read_by_transformers(kind, tmp_path, thousand):
    if kind == "llama":
        model, tokenizer = load_policy(BASE, quiet=True)
    else:
        model, tokenizer = of_few_words(kind, thousand), thousand
        for parameter in model.parameters():  # biases and norms that say something
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    assert type(theirs) is type(model)
    assert all(
        torch.equal(theirs.state_dict()[name], tensor)
        for name, tensor in model.state_dict().items()
    )
    assert torch.allclose(scores(theirs, tokenizer), scores(model, tokenizer), atol=1e-5)
    if kind == "llama":
        again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        for text in ("12 + 7 = 19\n", "  <answer>ä 漢</answer><|im_end|>", "don't  stop"):
            assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (
            again.chat_template == tokenizer.chat_template
            and again.eos_token == tokenizer.eos_token
        )


def test_matrices_are_stored_as_asked_and_vectors_whole(tmp_path, thousand):
    import gguf

    model, tokenizer = of_few_words("llama", thousand), thousand
    expected = model.model.layers[1].mlp.down_proj.weight.detach()
    for quant, kind, apart in (
        ("f16", "F16", 2**-11),
        ("bf16", "BF16", 2**-8),
        ("q8_0", "Q8_0", 1 / 127),
    ):
        write_gguf(tmp_path / f"{quant}.gguf", model, tokenizer, quant, name="m")
        tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{quant}.gguf").tensors}
        stored = tensors["blk.1.ffn_down.weight"]
        found = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
        assert stored.tensor_type.name == kind
        assert 0 < (found - expected).abs().max() <= apart * expected.abs().max()
        assert tensors["blk.1.ffn_norm.weight"].tensor_type.name == "F32"
        assert "output.weight" not in tensors, "a tied head is the embedding"


def test_gguf_export_proves_itself(tmp_path):
    """In 16 bits: within q8_0's rounding are the likeliest two tokens of so small a model."""
    model, tokenizer = adapted()
    made = export(
        model, tokenizer, tmp_path / "out", task=TASK, format="gguf", quant="f16", rows=3
    )
    assert sorted(p.name for p in made.folder.iterdir()) == [
        "Modelfile",
        "README.md",
        "export.json",
        "out-f16.gguf",
    ]
    assert made.proof.prompts_same == 3 and made.proof.kl < 0.02


def test_adapter_goes_onto_its_base_again(tmp_path):
    model, tokenizer = adapted()
    made = export(model, tokenizer, tmp_path / "out", task=TASK, format="adapter", proof=False)
    again, _ = load_policy(made.folder, tuning="lora", quiet=True)
    assert torch.allclose(scores(again, tokenizer), scores(model, tokenizer), atol=1e-6)
    assert BASE in repr(made) and "not proved" in repr(made)
    assert any(p.requires_grad for p in again.parameters()), "it can be trained on"


def test_an_adapter_on_an_export_names_it_in_full(tmp_path, monkeypatch):
    """Stacked: the first is added into its base, which is the second one's base, from wherever it is asked for."""
    first, tokenizer = adapted(base=few_words.folder())
    monkeypatch.chdir(tmp_path)
    for base, format in (("one", "merged"), ("two", "gguf")):
        made = export(first, tokenizer, base, format=format, quant="f32", proof=False)
        base = made.folder / made.file if made.file else made.folder
        second, _ = load_policy(base, tuning="lora", quiet=True)
        assert torch.allclose(scores(second, tokenizer), scores(first, tokenizer), atol=1e-5)
        torch.manual_seed(1)
        for name, parameter in second.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.2)
        stacked = export(
            second, tokenizer, f"{made.folder}-second", format="adapter", proof=False
        )
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            again, _ = load_policy(tmp_path / stacked.folder, tuning="lora", quiet=True)
        assert torch.allclose(scores(again, tokenizer), scores(second, tokenizer), atol=1e-5)
        assert not torch.allclose(
            scores(second, tokenizer), scores(first, tokenizer), atol=1e-2
        )


def test_active_adapters_are_added_up(tmp_path):
    from peft import LoraConfig

    model, tokenizer = adapted()
    model.add_adapter(
        "second", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            parameter.data.normal_(0, 0.5)
    one = scores(model, tokenizer)
    model.base_model.set_adapter(["default", "second"])
    both = scores(model, tokenizer)
    assert (
        torch.allclose(scores(whole_model(model), tokenizer), both, atol=1e-5)
        and (both - one).abs().max() > 0.1
    )
    with pytest.raises(ExportError, match="a saved one is loaded alone; .*use format='merged'"):
        export(model, tokenizer, tmp_path / "out", format="adapter", proof=False)
    assert not list(tmp_path.iterdir())
    model.set_adapter("second")
    made = export(model, tokenizer, tmp_path / "out", format="adapter", proof=False)
    again, _ = load_policy(made.folder, tuning="lora", quiet=True)
    assert torch.allclose(scores(again, tokenizer), scores(model, tokenizer), atol=1e-5)


@pytest.mark.parametrize("double", [False, True])
def test_4_bit_weights_are_added_up_as_what_they_stand_for(double, tmp_path):
    """On a CPU, where bitsandbytes computes slowly what it computes on a card."""
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    small, tokenizer = load_policy(BASE, quiet=True)
    # bitsandbytes wants whole blocks in its rows and columns, as real models have them
    config = small.config
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, device_map="cpu", dtype=torch.float32
    )
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    with torch.no_grad():
        trained = model.train()(
            **tokenizer("Which number is the largest?", return_tensors="pt")
        ).logits[0]
    made = whole_model(model)
    assert not hasattr(made.config, "quantization_config") and made.dtype == torch.float32
    assert torch.allclose(
        scores(made, tokenizer, "Which number is the largest?"), trained, atol=1e-5
    )
    answered = scores(model, tokenizer)
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    # Where a CPU has bfloat16, an answer makes bitsandbytes lay its weights out anew, with rounder scales.
    rounder = any(getattr(state, "packing_format_for_cpu", False) for state in states)
    assert torch.allclose(
        scores(whole_model(model), tokenizer), answered, atol=0.05 if rounder else 1e-5
    )
    with model.disable_adapter():
        assert (scores(model, tokenizer) - scores(whole, tokenizer)).abs().max() > 0.05, (
            "rounded to 4 bits"
        )


@pytest.mark.parametrize(
    "lora",
    [{"modules_to_save": ["norm"]}, {"modules_to_save": ["lm_head"]}, {"bias": "lora_only"}],
    ids=str,
)
def test_what_was_trained_beside_the_adapters_comes_along(lora):
    model, tokenizer = load_policy(BASE, tuning="lora", lora=lora, quiet=True)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    assert torch.allclose(
        scores(whole_model(model), tokenizer), scores(model, tokenizer), atol=1e-4
    )


@pytest.mark.parametrize(
    "lora",
    [{"trainable_token_indices": [1, 2]}, {"target_modules": ["q_proj", "embed_tokens"]}],
    ids=str,
)
def test_what_is_not_merged_right_is_refused(lora, tmp_path):
    model, tokenizer = load_policy(BASE, tuning="lora", lora=lora, quiet=True)
    with pytest.raises(
        ExportError, match="embedding.*that is not merged here. Use format='adapter'"
    ):
        export(model, tokenizer, tmp_path / "out", proof=False)
    assert not list(tmp_path.iterdir())


def test_a_long_answer_is_compared_as_far_as_it_goes(tmp_path, monkeypatch, read_here):
    """A first answer longer than all positions that are compared would else leave nothing to compare."""
    monkeypatch.setattr(exporting.verify, "_POSITIONS", 20)
    made = export(*adapted(), tmp_path / "out", quant="f32", max_completion_tokens=30)
    assert made.proof.positions == 20 and made.proof.kl < 1e-6


def test_a_trainer_brings_its_temperature_and_its_prompts(tmp_path):
    trainer = make(
        tmp_path / "run",
        steps=2,
        task=TASK,
        temperature=linear(1.2, 0.7),
        max_completion_tokens=12,
    )
    trainer.train()
    made = export(trainer, trainer.tokenizer, tmp_path / "out", task=TASK, proof=False)
    settings = json.loads((made.folder / "generation_config.json").read_text())
    assert settings["temperature"] == pytest.approx(0.7), "the last step's"
    other = dataclasses.replace(TASK, prefill="<a>")
    for task, said in (
        (None, "task=None renders"),
        (other, "task 'largest' renders the prompt"),
    ):
        with pytest.raises(ExportError, match=f"{said}.*give the task that it was trained on"):
            export(trainer, trainer.tokenizer, tmp_path / "new", task=task, proof=False)


def test_without_a_task_the_trainers_length_counts(tmp_path):
    plain = dataclasses.replace(TASK, prefill="", system=None, examples=[])
    trainer = make(tmp_path / "run", steps=2, task=plain, max_completion_tokens=12)
    made = export(trainer, trainer.tokenizer, tmp_path / "out", proof=False)
    settings = json.loads((made.folder / "generation_config.json").read_text())
    assert settings["max_new_tokens"] == 12 and settings["temperature"] == 1.0, (
        "before its first step, too"
    )


def test_a_task_of_several_turns(tmp_path, read_here):
    """The chat template takes the first turn's message, as its trainer's prompts hold it."""
    from examples.calculator import calculator

    task = calculator(8, 4)
    model, tokenizer = adapted()
    made = export(model, tokenizer, tmp_path / "out", task=task, rows=3)
    assert (
        made.proof.prompts_same == made.proof.questions == 3 and made.proof.comparison is None
    )
    served = AutoTokenizer.from_pretrained(made.folder)
    (message,) = _questions(task, task.train[:1])
    text = served.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    row = task.train[0]
    first = Renderer(tokenizer, task.view).first(row["question"], task.environment().reset(row))
    assert text == first.text


def test_another_model_is_refused_and_left_with_its_report(tmp_path, monkeypatch, read_here):
    model, tokenizer = adapted()
    real = write.whole_model

    def spoiled(model):
        made = real(model)
        made.model.layers[0].mlp.down_proj.weight.data *= -3
        return made

    monkeypatch.setattr(write, "whole_model", spoiled)
    with pytest.raises(
        ExportError,
        match="not the trained model: it is .* nats a token.*It lies in .*out-refused",
    ):
        export(model, tokenizer, tmp_path / "out", rows=2, quant="f32")
    assert [p.name for p in tmp_path.iterdir()] == ["out-refused"]
    assert json.loads((tmp_path / "out-refused" / "export.json").read_text())["proof"][
        "objections"
    ]


@pytest.fixture(params=[0, 1], ids="process {} of 2".format)
def rank(request):
    torch.distributed.init_process_group(
        "fake", rank=request.param, world_size=2, store=FakeStore()
    )
    yield request.param
    torch.distributed.destroy_process_group()


def test_one_of_several_processes_writes(rank, tmp_path):
    model, tokenizer = load_policy(BASE, quiet=True)
    if rank == 0:
        assert export(model, tokenizer, tmp_path / "new", proof=False).folder.is_dir()
        return
    with pytest.raises(
        ExportError, match="process 1 of 2, which would all write the same folder"
    ):
        export(model, tokenizer, tmp_path / "new", proof=False)
    assert not (tmp_path / "new").exists()


def test_arguments_that_do_not_fit(tmp_path):
    model, tokenizer = load_policy(BASE, quiet=True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    for changes, said in [
        ({"folder": tmp_path / "taken"}, "is there and not empty"),
        ({"folder": tmp_path / "taken" / "thesis.txt"}, "is there and not empty"),
        ({"format": "onnx"}, "format='onnx' is not known; use 'merged', 'gguf', 'adapter'"),
        ({"quant": "q8_0"}, "quant='q8_0' is none of format='merged''s: f32, f16, bf16"),
        ({"format": "adapter"}, "all its weights were trained"),
        ({"rows": 0}, "rows=0 must be at least 1"),
        ({"rows": []}, "rows is empty"),
    ]:
        with pytest.raises(ExportError, match=said):
            export(
                **{
                    "model": model,
                    "tokenizer": tokenizer,
                    "folder": tmp_path / "new",
                    "task": TASK,
                }
                | changes
            )
    assert (tmp_path / "taken" / "thesis.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    for one, other in [("a/path", tokenizer), (model, None), (model.config, tokenizer)]:
        with pytest.raises(
            ExportError, match="is a path; load it|is no tokenizer|kit.load_policy"
        ):
            export(one, other, tmp_path / "new")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    with pytest.raises(ExportError, match="largest weight is 1e.06; use 'f32'"):
        export(model, tokenizer, tmp_path / "new", quant="f16", proof=False)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def from_gguf(tmp_path):
    model, tokenizer = few_words.policy()
    write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
    return load_policy(tmp_path / "m.gguf", tuning="lora", quiet=True)


def on_a_merged_adapter(tmp_path):
    adapted(base=str(few_words.folder()))[0].save_pretrained(tmp_path / "first")
    model, tokenizer = load_policy(tmp_path / "first", quiet=True)
    return add_adapters(model, "lora", {}, 0), tokenizer


BASES = {  # what plain peft opens by its name, and what it does not, which is exported too
    "a folder": (lambda tmp_path: adapted(base=str(few_words.folder())), False),
    "the kit's name": (lambda tmp_path: adapted(base="tiny-random"), True),
    "resized": (lambda tmp_path: few_words.policy("lora"), True),
    "a GGUF file": (from_gguf, True),
    "a merged adapter": (on_a_merged_adapter, True),
}


@pytest.mark.parametrize("what", BASES)
def test_plain_peft_opens_an_exported_adapter(what, tmp_path):
    make, beside = BASES[what]
    model, tokenizer = make(tmp_path)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    proved = what in ("a folder", "resized")  # by a process without the kit
    made = export(
        model,
        tokenizer,
        tmp_path / "out",
        format="adapter",
        task=TASK if proved else None,
        proof=proved,
    )
    assert (made.folder / "base").is_dir() == beside and (not proved or made.proof.kl < 1e-6)
    theirs = AutoPeftModelForCausalLM.from_pretrained(made.folder)
    assert torch.allclose(scores(theirs, tokenizer), scores(model, tokenizer), atol=1e-5)


@pytest.mark.parametrize("ends", [[2], [0, 2], [2, 0, 1], [5, 2], [2, 0, 1, 5], [7, 6, 5]])
def test_a_gguf_file_names_every_end(ends, tmp_path):
    import gguf

    model, tokenizer = few_words.policy()
    model.generation_config.eos_token_id = ends
    wanted = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    if len(wanted) > 3:
        with pytest.raises(ExportError, match="completions end at 4 tokens .* names 3 at most"):
            write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
        return
    write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    assert [field.contents() for field in named if field] == wanted
    assert end_ids(*load_policy(tmp_path / "m.gguf", quiet=True)) == wanted


def test_reader_needs_nothing_of_the_kit():
    assert "import grpo_kit" not in (
        text := Path(exporting.__file__).with_name("_reader.py").read_text()
    )
    assert "from grpo_kit" not in text


def test_a_base_says_its_licence(tmp_path, thousand):
    model, tokenizer = of_few_words("llama", thousand), thousand
    write_gguf(
        tmp_path / "m.gguf", model, tokenizer, "f32", name="m", license="mit", temperature=0.7
    )
    (tmp_path / "README.md").write_text("---\nlicense: gpl-3.0\n---\n# a model\n")
    assert (
        license_of(str(tmp_path / "m.gguf")) == "mit" and license_of(str(tmp_path)) == "gpl-3.0"
    )
    assert (
        license_of("smollm2-135m-instruct") == "apache-2.0"
        and license_of("owner/unknown") is None
    )
    import gguf

    assert gguf.GGUFReader(tmp_path / "m.gguf").get_field(
        "general.sampling.temp"
    ).contents() == pytest.approx(0.7)


def test_card_of_a_run_and_its_way_to_the_hub(tmp_path, read_here):
    trainer = make(tmp_path / "run", steps=1, task=TASK, max_completion_tokens=12)
    trainer.train()
    tokenizer = trainer.tokenizer
    made = export(
        trainer, tokenizer, tmp_path / "out", task=TASK, proof=False, license="apache-2.0",
        comparison="strict: 1 -> 2",
    )  # fmt: skip
    card = (made.folder / "README.md").read_text()
    for said in ("license: apache-2.0", "library_name: transformers", 'base_model: "tiny-random"', "| seed |",
                 "| device |", "strict: 1 -> 2",
                 "## Reward while training", "| command | `python ", "](curve.png)", "Not read back",
                 "AutoModelForCausalLM.from_pretrained"):  # fmt: skip
        assert said in card, said
    with pytest.raises(ExportError, match="was not proved"):
        made.push_to_hub("me/mine", dry_run=True)
    made = export(trainer, tokenizer, tmp_path / "proved", task=TASK, rows=2)
    said = made.push_to_hub("me/mine", dry_run=True)
    assert (
        said.startswith("would go to me/mine, private:")
        and "model.safetensors" in said
        and "README.md" in said
    )
    card = (made.folder / "README.md").read_text()
    assert (
        "licence: that of tiny-random, which the kit does not know" in card
        and "2 of 2 as in training" in card
    )
    listed = {line.split()[-1] for line in said.splitlines()[1:]}
    assert listed == {path.name for path in made.folder.iterdir()} and "curve.png" in listed
    with pytest.raises(ExportError, match="must be owner/name"):
        made.push_to_hub("mine", dry_run=True)
    with pytest.raises(ExportError, match="the hub did not take it .*is untouched"):
        made.push_to_hub("me/mine")
    # The model that the card's own lines load says what the trained one says.
    lines = (
        card.partition("```python\n")[2]
        .partition("```")[0]
        .replace('"proved"', repr(str(made.folder)))
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
