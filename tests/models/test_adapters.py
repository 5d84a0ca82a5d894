"""Saved adapters: they name their base, go on training on it, and merge into it without losing what was learned."""

import json
import warnings

import few_words
import pytest
import torch
from loop_runs import make
from peft import LoraConfig, get_peft_model

from grpo_kit.models import load_policy
from grpo_kit.models._adapters import add_adapters
from grpo_kit.models._gguf_reader import PolicyLoadError, embedded_folder
from grpo_kit.models._model_facts import model_name

BASE = str(few_words.folder())


def moved(name=BASE, *, size=0.02, **lora):
    """A LoRA model whose adapters do something, and its tokenizer."""
    base, tokenizer = load_policy(name, quiet=True)
    model = add_adapters(base, "lora", lora, 0)
    torch.manual_seed(0)
    for n, weight in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(weight, std=size)
    return model, tokenizer


@torch.no_grad()
def logits(model, tokenizer):
    return model(tokenizer("2 + 2 =", return_tensors="pt").input_ids).logits.float()


def test_an_adapter_names_its_base_and_loads_elsewhere(tmp_path, monkeypatch):
    """Not by the path of one machine's cache: the copy is loaded where that cache does not exist."""
    model, tokenizer = moved("smollm2-135m-instruct", r=2)
    cache = embedded_folder()
    with warnings.catch_warnings(record=True) as said:
        model.save_pretrained(tmp_path / "adapter")
    assert not [w for w in said if "smollm2" in str(w.message)], (
        "peft asks the hub for it, which is no trouble"
    )
    for file in (tmp_path / "adapter").glob("*.*"):
        assert str(cache.parent).encode() not in file.read_bytes(), file
    assert model_name(model) == model_name(model.get_base_model()) == "smollm2-135m-instruct"
    (tmp_path / "other machine").mkdir()
    (tmp_path / "other machine" / cache.name).symlink_to(cache)
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "other machine"))
    again, _ = load_policy(tmp_path / "adapter", tuning="lora", quiet=True)
    assert embedded_folder().parent == tmp_path / "other machine"
    assert torch.equal(logits(model, tokenizer), logits(again, tokenizer))
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    with pytest.raises(ValueError, match="has its own settings"):
        load_policy(tmp_path / "adapter", tuning="lora", lora={"r": 4})
    with pytest.raises(ValueError, match="no effect with tuning='full'"):
        load_policy(tmp_path / "adapter", lora={"r": 4})


def with_token(name):
    """A model that was resized for a token of its own."""
    model, tokenizer = load_policy(name, quiet=True)
    tokenizer.add_tokens(["<step>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, tokenizer


def trained_since():
    model, tokenizer = few_words.policy()
    for weight in model.parameters():
        weight.data.mul_(1.1)
    return model, tokenizer


def made_in_memory():
    model, tokenizer = few_words.policy()
    model.config.name_or_path = model.name_or_path = ""
    del model._grpo_kit_loaded
    return model, tokenizer


ON_BASES = {  # what adapters are on, how they are made, and whether the base is saved with them
    "the kit's name": (lambda: load_policy("tiny-random", quiet=True), {}, False),
    "a folder": (lambda: load_policy(few_words.folder(), quiet=True), {}, False),
    "cut to few words": (few_words.policy, {}, True),
    "with a token more": (lambda: with_token("tiny-random"), {}, True),
    "trained since": (trained_since, {}, True),
    "made in memory": (made_in_memory, {}, True),
    "another adapter's name": (few_words.policy, {"adapter_name": "mine"}, True),
    "a whole head too": (lambda: load_policy(few_words.folder(), quiet=True), {"modules_to_save": ["lm_head"]}, False),
}  # fmt: skip


@pytest.mark.parametrize("what", ON_BASES)
def test_what_save_model_wrote_is_loaded_with_its_tokenizer_wherever_it_lies(what, tmp_path):
    make_base, how, beside = ON_BASES[what]
    base, tokenizer = make_base()
    name = {"adapter_name": how["adapter_name"]} if "adapter_name" in how else {}
    lora = {key: value for key, value in how.items() if key not in name}
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **lora), **name
    )
    for n, weight in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(weight, std=0.1)
    tokenizer.chat_template = "{{ 'Mine: ' }}" + tokenizer.chat_template
    trainer = make(tmp_path / "run", model=model, tokenizer=tokenizer, tuning=None)
    saved = trainer.save_model(tmp_path / "saved").rename(tmp_path / "moved")
    assert (saved / "base").is_dir() == beside
    # a head that is tied cannot be merged
    for tuning in ("lora", "full") if not lora else ("lora",):
        again, own = load_policy(saved, tuning=tuning, quiet=True)
        assert own.chat_template == tokenizer.chat_template and len(own) == len(tokenizer)
        assert torch.allclose(
            logits(again, own), logits(model, tokenizer)[..., : len(own)], atol=1e-5
        )


def test_a_checkpoint_of_a_resized_base_says_what_saves_it(tmp_path):
    model, tokenizer = with_token("tiny-random")
    add_adapters(model, "lora", {}, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        PolicyLoadError, match="49153 tokens and its base 'tiny-random' 49152 embeddings"
    ):
        load_policy(tmp_path, tuning="lora", quiet=True)


@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 4, "use_dora": True}])
def test_merged_is_the_adapted_model_and_all_of_it_trains(tmp_path, capsys, lora):
    model, tokenizer = moved(**lora)
    model.save_pretrained(tmp_path)
    merged, _ = load_policy(tmp_path)
    assert f"the adapter in {tmp_path} is merged into {BASE}" in capsys.readouterr().out
    assert not hasattr(merged, "peft_config") and not [
        n for n, _ in merged.named_parameters() if "lora" in n
    ]
    assert all(p.requires_grad and p.dtype == torch.float32 for p in merged.parameters())
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    changed = (
        (logits(model, tokenizer) - logits(load_policy(BASE, quiet=True)[0], tokenizer))
        .abs()
        .max()
    )
    assert changed > 1e-3
    torch.testing.assert_close(
        logits(merged, tokenizer), logits(model, tokenizer), rtol=0, atol=1e-6
    )


def test_a_small_adapter_is_added_up_before_rounding(tmp_path):
    """What bfloat16 weights would round away is in the sum: weights are the nearest to the exact ones."""
    model, _ = moved(size=1e-4)
    model.save_pretrained(tmp_path)
    merged, _ = load_policy(tmp_path, dtype="bfloat16", quiet=True)
    exact, _ = load_policy(tmp_path, dtype="float32", quiet=True)
    before, _ = load_policy(BASE, dtype="bfloat16", quiet=True)
    for (name, a), b in zip(merged.named_parameters(), exact.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16()), name
    moves = [
        (a != b).float().mean()
        for a, b in zip(merged.parameters(), before.parameters(), strict=True)
    ]
    assert max(moves) > 0.01  # of a matrix; rounded first, the sum would move next to none


def test_a_merged_model_is_a_base_like_any_other(tmp_path, tiny):
    first, tokenizer = moved(r=4)
    first.save_pretrained(tmp_path / "first")
    second, _ = moved(tmp_path / "first", r=2)
    assert model_name(second) == str(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    again, _ = load_policy(tmp_path / "second", tuning="lora", quiet=True)
    assert torch.equal(logits(again, tokenizer), logits(second, tokenizer))
    merged, found = load_policy(tmp_path / "second", quiet=True)
    torch.testing.assert_close(
        logits(merged, tokenizer), logits(second, tokenizer), rtol=0, atol=1e-6
    )
    # Its tokenizer is found along the chain.
    assert found.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"base_model_name_or_path": None},
            "names no base model; write its name or path there",
        ),
        (
            {"base_model_name_or_path": "/nowhere/base"},
            "name_or_path='/nowhere/base': no such folder",
        ),
        (
            {"base_model_name_or_path": "smollm2-135m-instruct"},
            "its adapter does not go onto 'smollm2-135m-instruct'",
        ),
        ({"peft_type": "NEW"}, "its adapter_config.json cannot be read"),
    ],
)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_adapters_that_cannot_be_loaded(tmp_path, config, message, tuning):
    moved()[0].save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(PolicyLoadError, match=message):
        load_policy(tmp_path, tuning=tuning, quiet=True)


def test_virtual_tokens_cannot_be_merged(tmp_path, tiny):
    from peft import PromptTuningConfig, get_peft_model

    get_peft_model(
        tiny[0], PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(
        PolicyLoadError, match="cannot be merged into weights: its kind is PROMPT_TUNING"
    ):
        load_policy(tmp_path, quiet=True)
