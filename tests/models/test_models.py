"""Loading: what comes back, and what is said when something is missing."""

import subprocess
import sys

import huggingface_hub.constants
import pytest
import torch

from grpo_kit.models import describe
from grpo_kit.models._gguf_reader import PolicyLoadError
from grpo_kit.models.loading import load_policy


def test_embedded_model_is_the_real_one(smol):
    model, tokenizer = smol
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    logits = model(**inputs).logits[0, -1]
    assert tokenizer.decode(logits.argmax()).strip() == "Paris"
    assert "<|im_start|>" in tokenizer.chat_template


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
    assert all(
        torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(None, torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_full_dtype(dtype, wanted):
    model = load_policy("tiny-random", dtype=dtype, quiet=True)[0]
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert all(p.requires_grad for p in model.parameters())


@pytest.fixture
def card(monkeypatch):
    """f(bytes, bf16=True): what models/ learns of a card of that size; weights stay on the CPU."""

    def make(size, *, bf16=True):
        properties = type("Properties", (), {"total_memory": size})
        monkeypatch.setattr("grpo_kit.models._precision.has_bf16", lambda: bf16)
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
    """16 bytes a weight may fill half of the card; said with what other optimizers would lose, quiet or not."""
    model, tokenizer = tiny
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    card(int(room * 16 * model.num_parameters()))
    loaded = load_policy(tmp_path, quiet=True, **options)[0]
    assert {p.dtype for n, p in loaded.named_parameters() if "lora_" not in n} == {wanted}
    out = capsys.readouterr().out
    assert ("adamw-8bit-split" in out and "loses most of each small update" in out) == (
        room < 2 and not options
    )
    assert out.count("\n") <= 1


def test_a_model_is_loaded_onto_the_current_card(card, monkeypatch):
    asked = []
    card(2**34)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(
        "grpo_kit.models.loading.use_expandable_segments", lambda: asked.append("segments")
    )
    monkeypatch.setattr(
        "grpo_kit.models.loading._load",
        lambda name, kwargs, tuning: asked.append(kwargs) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        load_policy("owner/name")
    assert asked == ["segments", {"dtype": None, "device_map": {"": torch.device("cuda", 1)}}]


def test_weights_on_a_card_that_only_emulates_bfloat16_are_float32(
    card, tiny, tmp_path, capsys
):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    card(1, bf16=False)
    for tuning in ("full", "lora"):
        loaded = load_policy(tmp_path, tuning=tuning, quiet=True)[0]
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert capsys.readouterr().out == ""


def test_adapters_are_float32_on_any_base_and_not_on_the_head():
    model = load_policy(
        "tiny-random", tuning="lora", dtype="bfloat16", lora={"r": 4}, quiet=True
    )[0]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if n not in trained} == {
        torch.bfloat16
    }
    assert not [n for n in trained if "lm_head" in n]
    assert {min(p.shape) for p in trained.values()} == {4}


def test_describe_counts():
    model = load_policy("tiny-random", tuning="lora", quiet=True)[0]
    total = sum(p.numel() for p in model.parameters())
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / total
    assert f"{total / 1e6:,.1f} M parameters" in describe(
        model
    ) and f"({share:.1%})" in describe(model)


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
        (
            "tiny-random",
            {"tuning": "lora", "lora": 8},
            "lora=8 must be a dict of peft.LoraConfig's fields",
        ),
        (
            "tiny-random",
            {"tuning": "lora", "lora": {"r": "8"}},
            "lora=.'r': '8'. is refused by peft",
        ),
        ("runs/full/model", {}, "name_or_path='runs/full/model': no such folder"),
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

    monkeypatch.setattr("grpo_kit.models.loading.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(PolicyLoadError, match="gated: accept its terms"):
        load_policy("owner/gated")


def test_folder_whose_weights_were_cut_off(tiny, tmp_path):
    for part in tiny:
        part.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        PolicyLoadError, match="cannot be loaded as a language model .*saved to its end"
    ):
        load_policy(tmp_path)


def test_folder_without_a_tokenizer(tiny, tmp_path):
    tiny[0].save_pretrained(tmp_path)
    with pytest.raises(PolicyLoadError, match="(?s)holds no tokenizer.*save it there too"):
        load_policy(tmp_path)


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
    assert not torch.equal(first, adapters(seed=1)) and torch.equal(
        adapters(seed=1), adapters(seed=1)
    )


def test_bitsandbytes_does_not_load_the_compiler():
    """torch._inductor takes a second, and nobody has asked for anything compiled."""
    code = (
        "import sys, grpo_kit; from grpo_kit.models._adapters import load_peft; load_peft(); import torch; "
        "loaded = 'torch._inductor.compile_fx' in sys.modules; "
        "print('bitsandbytes' in sys.modules, loaded, torch.compile.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "torch"], done.stderr
