"""Loading: what comes back, and what is said when something is missing."""

import os
import shutil
import subprocess
import sys
import warnings

import huggingface_hub.constants
import pytest
import torch
from datasets import Dataset
from tiny_run import settings
from transformers import AutoModelForCausalLM

from grpo_kit import GRPOTrainer, models
from grpo_kit.models import (
    PolicyLoadError,
    _embedded_gguf,
    _load_gguf,
    _tie_if_one_matrix,
    describe,
    load_policy,
    model_name,
)


def test_embedded_model_is_the_real_one(smol):
    model, tokenizer = smol
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    logits = model(**inputs).logits[0, -1]
    assert tokenizer.decode(logits.argmax()).strip() == "Paris"
    assert "<|im_start|>" in tokenizer.chat_template


def test_converted_copy_equals_the_gguf(smol):
    """The cache must not drift from the package: same weights, bit for bit."""
    fresh, _ = _load_gguf(_embedded_gguf(), {"dtype": torch.float32})
    for (name, a), b in zip(fresh.named_parameters(), smol[0].parameters(), strict=True):
        assert torch.equal(a, b), name


def test_gguf_by_path_can_be_saved(tmp_path):
    model, tokenizer = load_policy(_embedded_gguf(), quiet=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


def test_tiny_random_is_the_same_every_time_and_leaves_the_seed_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a = load_policy("tiny-random", quiet=True)[0]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    b = load_policy("tiny-random", quiet=True)[0]
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_local_folder(tiny, tmp_path):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_policy(tmp_path, quiet=True)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_full_dtype(dtype, wanted):
    model = load_policy("tiny-random", dtype=dtype, quiet=True)[0]
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert all(p.requires_grad for p in model.parameters())


@pytest.fixture
def card(monkeypatch):
    """f(bytes, bf16=True): what models.py learns of a card of that size; weights stay on the CPU."""

    def make(size, *, bf16=True):
        properties = type("Properties", (), {"total_memory": size})
        monkeypatch.setattr(models, "has_bf16", lambda: bf16)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return make


@pytest.mark.parametrize(
    ("room", "options", "wanted"),
    [
        (2.1, {}, torch.float32),
        (1.9, {}, torch.bfloat16),
        (1.9, {"dtype": "float32"}, torch.float32),
        (1.9, {"tuning": "lora"}, torch.bfloat16),
        (2.1, {"tuning": "lora"}, torch.bfloat16),
    ],
)
def test_weights_on_a_card_are_bfloat16_where_float32_leaves_no_room(
    card, tiny, tmp_path, capsys, room, options, wanted
):
    """16 bytes a weight may fill half of the card; said with what trl's own trainer would lose, quiet or not."""
    model, tokenizer = tiny
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    card(int(room * 16 * model.num_parameters()))
    loaded = load_policy(tmp_path, quiet=True, **options)[0]
    assert {p.dtype for n, p in loaded.named_parameters() if "lora_" not in n} == {wanted}
    out = capsys.readouterr().out
    assert ("adamw-8bit-split" in out and "trl's own too" in out) == (room < 2 and not options)
    assert out.count("\n") <= 1


def test_a_model_is_loaded_onto_the_current_card(card, monkeypatch):
    asked = []
    card(2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(models, "use_expandable_segments", lambda: asked.append("segments"))
    monkeypatch.setattr(models, "_load", lambda name, kwargs, tuning: asked.append(kwargs) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_policy("owner/name")
    assert asked == ["segments", {"dtype": None, "device_map": {"": 1}}]


def test_weights_on_a_card_that_only_emulates_bfloat16_are_float32(card, tiny, tmp_path, capsys):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    card(1, bf16=False)
    for tuning in ("full", "lora"):
        loaded = load_policy(tmp_path, tuning=tuning, quiet=True)[0]
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert capsys.readouterr().out == ""


def test_adapters_are_float32_on_any_base_and_not_on_the_head():
    model = load_policy("tiny-random", tuning="lora", dtype="bfloat16", lora={"r": 4}, quiet=True)[0]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if n not in trained} == {torch.bfloat16}
    assert not [n for n in trained if "lm_head" in n]
    assert {min(p.shape) for p in trained.values()} == {4}


def test_describe_counts():
    model = load_policy("tiny-random", tuning="lora", quiet=True)[0]
    total = sum(p.numel() for p in model.parameters())
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / total
    assert f"{total / 1e6:,.1f} M parameters" in describe(model) and f"({share:.1%})" in describe(model)


def test_one_matrix_stored_twice_is_tied_again():
    """As in Qwen2.5's GGUF files: a tied model comes back untied, at two precisions."""
    model = load_policy("tiny-random", quiet=True)[0]
    head = torch.nn.Linear(32, model.config.vocab_size, bias=False)
    head.weight.data = model.get_input_embeddings().weight.data + 1e-4 * torch.randn(
        model.config.vocab_size, 32
    )
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    _tie_if_one_matrix(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, head.weight)


def test_two_matrices_stay_two():
    model = load_policy("tiny-random", quiet=True)[0]
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(torch.nn.Linear(32, model.config.vocab_size, bias=False))
    _tie_if_one_matrix(model)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny-random", {"tuning": "half"}, "tuning='half'.*'full', 'lora' or 'qlora'"),
        ("tiny-random", {"dtype": "int3"}, "dtype='int3'.*float32"),
        ("tiny-random", {"lora": {"r": 8}}, "no effect with tuning='full'"),
        ("/nowhere/model.gguf", {}, "is no file"),
        ("owner/not-there", {}, "hub could not be reached.*smollm2"),
        ("/nowhere/model", {}, "name_or_path='/nowhere/model': no such folder"),
        ("./nowhere", {}, "no such folder"),
        (None, {}, "name_or_path=None must be a name or a path"),
        ("", {}, "name_or_path='' must be a name or a path"),
        (
            "tiny-random",
            {"tuning": "lora", "lora": {"bogus": 1}},
            "lora has bogus: no field of peft.LoraConfig",
        ),
    ],
)
def test_errors_say_what_would_do(name, options, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        load_policy(name, quiet=True, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_qlora_without_a_gpu():
    with pytest.raises(PolicyLoadError, match="needs a CUDA GPU.*tuning='lora'"):
        load_policy("tiny-random", tuning="qlora")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(PolicyLoadError, match="holds no config.json"):
        load_policy(tmp_path)


def test_gated_model_says_how_to_get_in(monkeypatch):
    """The hub's real exception, raised where the hub would raise it; the hub itself is not asked."""

    def refuse(*args, **kwargs):
        raise OSError("You are trying to access a gated repo. 401 Client Error.")

    monkeypatch.setattr("grpo_kit.models.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(PolicyLoadError, match="gated: accept its terms"):
        load_policy("owner/gated")


def test_folder_without_a_tokenizer(tiny, tmp_path):
    tiny[0].save_pretrained(tmp_path)
    with pytest.raises(PolicyLoadError, match="holds no tokenizer; save it there too"):
        load_policy(tmp_path)


def test_an_adapter_names_its_base_and_loads_elsewhere(tmp_path, monkeypatch):
    """Not by the path of one machine's cache: the copy is loaded where that cache does not exist."""
    model, tokenizer = load_policy("smollm2-135m-instruct", tuning="lora", lora={"r": 2}, quiet=True)
    cache = models._embedded_folder()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    with warnings.catch_warnings(record=True) as said:
        model.save_pretrained(tmp_path / "adapter")
    assert not [w for w in said if "smollm2" in str(w.message)], (
        "peft asks the hub for it, which is no trouble"
    )
    for file in (tmp_path / "adapter").glob("*.*"):
        assert str(cache.parent).encode() not in file.read_bytes(), file
    assert model_name(model) == model_name(model.get_base_model()) == "smollm2-135m-instruct"
    shutil.copytree(cache, tmp_path / "other machine" / cache.name)
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "other machine"))
    again, _ = load_policy(tmp_path / "adapter", tuning="lora", quiet=True)
    assert models._embedded_folder().parent == tmp_path / "other machine"
    ids = tokenizer("2 + 2 =", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    with pytest.raises(PolicyLoadError, match="holds an adapter, not a whole model; use tuning='lora'"):
        load_policy(tmp_path / "adapter")
    with pytest.raises(ValueError, match="has its own settings"):
        load_policy(tmp_path / "adapter", tuning="lora", lora={"r": 4})


@pytest.fixture
def converts(tiny, monkeypatch):
    """A conversion of a tiny model in place of SmolLM2's, which takes 20 s; it says where it was asked to write."""
    asked = []

    def convert(gguf, folder):
        asked.append(folder)
        for part in tiny:
            part.save_pretrained(folder)

    monkeypatch.setattr(models, "_convert", convert)
    yield asked
    models._converted_for_this_process.cache_clear()


def test_a_cache_that_cannot_be_written_is_said_and_does_without(tmp_path, monkeypatch, converts):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="GRPO_KIT_CACHE='.*cache' cannot be written"):
        load_policy("smollm2-135m-instruct", quiet=True)
    with pytest.warns(RuntimeWarning, match="set GRPO_KIT_CACHE to a folder that can be"):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert len(converts) == 1, "once a process"


def test_what_a_killed_conversion_left_is_cleaned(tmp_path, monkeypatch, converts):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    old, running = tmp_path / ".converting-old", tmp_path / ".converting-running"
    old.mkdir(), running.mkdir()
    os.utime(old, (0, 0))
    load_policy("smollm2-135m-instruct", quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".converting-running",
        "smollm2-135m-instruct-float32",
    ]


def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    def stop(gguf, folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        load_policy("smollm2-135m-instruct", quiet=True)
    assert not list(tmp_path.iterdir())


def test_the_trainer_finds_the_embedded_tokenizer(tmp_path):
    model, tokenizer = load_policy("smollm2-135m-instruct", tuning="lora", quiet=True)
    data = Dataset.from_dict({"prompt": ["2 + 2 ="] * 8})
    options = {"train_dataset": data, "live": False}
    made = GRPOTrainer(
        model, lambda completions, **columns: [1.0] * len(completions), settings(tmp_path), **options
    )
    assert made.processing_class.get_vocab() == tokenizer.get_vocab()


def test_adapters_are_a_function_of_the_seed_alone():
    """LoRA's first matrix is drawn: not from whatever was drawn before, and no other random number moves."""

    def adapters(**options):
        model = load_policy("tiny-random", tuning="lora", quiet=True, **options)[0]
        return torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n])

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = adapters()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, adapters()) and torch.equal(first, adapters(seed=0))
    assert not torch.equal(first, adapters(seed=1)) and torch.equal(adapters(seed=1), adapters(seed=1))


def test_bitsandbytes_does_not_load_the_compiler():
    """torch._inductor takes a second, and nobody has asked for anything compiled."""
    code = (
        "import sys, grpo_kit; grpo_kit.load_policy, grpo_kit.GRPOTrainer; import torch; "
        "loaded = 'torch._inductor.compile_fx' in sys.modules; "
        "print('bitsandbytes' in sys.modules, loaded, torch.compile.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "torch"], done.stderr
