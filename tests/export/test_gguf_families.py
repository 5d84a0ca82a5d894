"""A GGUF of each family: read by llama.cpp where llama_cpp can be imported, by transformers, and by hand."""

import copy
import json
import math

import few_words
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from benchmarks.architectures import GGUF_SIZES, in_llama_cpp, tiny
from grpo_kit.more.export import ExportError, export
from grpo_kit.more.export._gguf_tokens import _GPT4O, _LLAMA3, _QWEN2, _TEKKEN, splitting_of
from grpo_kit.more.export._gguf_writer import write_gguf

gguf = pytest.importorskip("gguf")
WORDS = few_words.tokenizer(1000)
# What transformers' reader takes as its families' defaults, since it reads none of it.
AS_READ = {
    "mistral": {}, "ministral": {}, "phi3": {}, "qwen3-moe": {"moe_intermediate_size": 768},
    "gemma2": {"query_pre_attn_scalar": 256, "head_dim": 256, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0},
    "gemma3": {"query_pre_attn_scalar": 256, "head_dim": 256, "layer_types": None},
}  # fmt: skip
KEYS = {  # by hand, of the settings in benchmarks.architectures
    "llama3": {"llama.context_length": 256, "llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 32},
    "mistral": {"llama.context_length": 100},
    "qwen3-moe": {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2},
    "gemma2": {"gemma2.attn_logit_softcapping": 5.0, "gemma2.attention.sliding_window": 8,
               "gemma2.attention.sliding_window_pattern": [True, False, True, False]},
    "gemma3": {"gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 1e4, "gemma3.attention.key_length": 32},
    "phi4-mini": {"phi3.context_length": 256, "phi3.rope.scaling.original_context_length": 256,
                  "phi3.rope.dimension_count": 24,
                  "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(1024 / 256) / math.log(256))},
    "granite": {"granite.embedding_scale": 2.0, "granite.logit_scale": 3.0, "granite.residual_scale": 0.5,
                "granite.attention.scale": 0.2},
    "smollm3": {"smollm3.context_length": 256},
    "olmo2": {"olmo2.attention.layer_norm_rms_epsilon": 1e-5},
    "olmo3": {"olmo2.attention.sliding_window": 8, "olmo2.attention.sliding_window_pattern": [True, False] * 2},
}  # fmt: skip


def of_family(family, **more):
    return tiny(family, vocabulary=len(WORDS), **GGUF_SIZES[family] | more)


@pytest.mark.parametrize("family", GGUF_SIZES)
def test_llama_cpp_computes_the_same(family, tmp_path):
    """Log-probabilities of drawn tokens, longer than the windows of 8, and the same greedy text."""
    pytest.importorskip(
        "llama_cpp", reason="no llama-cpp-python, which is compiled here for ten minutes"
    )
    assert in_llama_cpp(family, WORDS).startswith("equal")


@pytest.mark.parametrize("family", AS_READ)
def test_transformers_reads_the_same(family, tmp_path):
    model = of_family(family, num_hidden_layers=2, **AS_READ[family])
    write_gguf(tmp_path / "m.gguf", model, WORDS, "f32", name="m")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("family", KEYS)
def test_keys_and_weights_by_hand(family, tmp_path):
    """The weights as transformers' own processors turn them back; experts, norms and rotary factors by hand."""
    model = of_family(family)
    config = model.config
    write_gguf(tmp_path / "m.gguf", model, WORDS, "f32", name="m")
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {name: read.fields[name].contents() for name in KEYS[family]}
    assert found == {
        k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v
        for k, v in KEYS[family].items()
    }
    arch = read.fields["general.architecture"].contents()
    tensors = {
        t.name: torch.tensor(np.array(t.data)).reshape(*reversed(t.shape.tolist()))
        for t in read.tensors
    }
    undo = LlamaTensorProcessor(config=config.to_dict()).process
    rest = dict(tensors)

    def same(name, expected):
        one = rest.pop(name)
        if arch in ("llama", "granite", "smollm3"):
            one = torch.tensor(undo(one.numpy(), name).weights)
        assert torch.equal(one, expected), name

    same("token_embd.weight", model.model.embed_tokens.weight)
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, part in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj"),
                           ("attn_qkv", "qkv_proj")):  # fmt: skip
            if hasattr(attention, part):
                same(f"blk.{i}.{name}.weight", getattr(attention, part).weight)
        if family == "qwen3-moe":
            gate, up = mlp.experts.gate_up_proj.chunk(2, 1)
            same(f"blk.{i}.ffn_gate_exps.weight", gate)
            same(f"blk.{i}.ffn_up_exps.weight", up)
            same(f"blk.{i}.ffn_down_exps.weight", mlp.experts.down_proj)
            same(f"blk.{i}.ffn_gate_inp.weight", mlp.gate.weight)
        else:
            same(f"blk.{i}.ffn_down.weight", mlp.down_proj.weight)
        shift = 1 if arch.startswith("gemma") else 0
        if hasattr(layer, "input_layernorm"):
            same(f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight + shift)
    # wavelengths below 32 / 4 as they are, above 32 / 1 by 8, between them by both
    if family == "llama3":
        waves = 2 * math.pi * 5e5 ** (torch.arange(0, 32, 2) / 32)
        between = (32 / waves - 1) / (4 - 1)
        smooth = 1 / ((1 - between) / 8 + between)
        wanted = torch.where(waves < 8, 1.0, torch.where(waves > 32, 8.0, smooth))
        assert torch.allclose(rest.pop("rope_freqs.weight"), wanted, rtol=1e-5)
    if family == "phi4-mini":
        assert rest.pop("rope_factors_long.weight").tolist() == [2.0 + i for i in range(12)]
        assert rest.pop("rope_factors_short.weight").tolist() == [1 + i / 8 for i in range(12)]
    assert not [name for name in rest if "rope" in name or "exps" in name]


@pytest.mark.parametrize(
    "family, change, said",
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers=.*llama.cpp computes smollm3 with"),
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob=False: llama.cpp computes qwen3_moe with True"),
        ("gemma3", {"query_pre_attn_scalar": 48}, "query_pre_attn_scalar=48: .* with 32 only"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping=None"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("smollm3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
         "rope_type='linear': format='gguf' writes no such"),
        ("gpt2", {}, "model_type='gpt2': format='gguf' knows .*smollm3; use format='merged' and llama.cpp's own"),
    ],
)  # fmt: skip
def test_what_llama_cpp_computes_otherwise_is_refused(family, change, said, tmp_path):
    model = tiny(family, vocabulary=len(WORDS), **GGUF_SIZES.get(family, {}))
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ExportError, match=said):
        write_gguf(tmp_path / "m.gguf", model, WORDS, "f32", name="m")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "family, said",
    [
        ("granite", "transformers reads no GGUF of model_type='granite'"),
        ("llama3", "rotary positions of type 'llama3'"),
    ],
)
def test_what_transformers_does_not_read_is_written_without_a_proof(family, said, tmp_path):
    model = of_family(family)
    with pytest.raises(ExportError, match=f"{said}.*proof=False"):
        export(model, WORDS, tmp_path / "out", format="gguf", quant="f32")
    made = export(model, WORDS, tmp_path / "out", format="gguf", quant="f32", proof=False)
    assert (made.folder / made.file).stat().st_size > 1e5


# ---- tokenizers -----------------------------------------------------------------------------------------------------

TEXTS = (
    "Which number is the largest: 1, 2, 3?", "  two  spaces\n\n\nand\tlines   ", "don't  STOP, We'LL", " a",
    "12345678", "ä 漢字 é ÉCOLE Éa 😀 naïve", "<start_of_turn>user\nHi<end_of_turn>\n", "x<answer>12</answer>",
    "Привет мир ΑΒΓ αβγ",
)  # fmt: skip


def split_by(regex, ignore_merges):
    tokenizer = copy.deepcopy(WORDS)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model = backend.model
    model.ignore_merges = ignore_merges
    backend.model = model
    return tokenizer


def of_pieces(normalizer, pre_tokenizer=None):
    """A tokenizer like Gemma's: pieces of text and bytes for the rest."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(
        [__doc__, *TEXTS] * 2,
        trainers.BpeTrainer(vocab_size=300, max_token_length=6, show_progress=False),
    )
    made = json.loads(learned.to_str())["model"]
    vocabulary = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *made["vocab"],
    ]
    backend = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(dict.fromkeys(vocabulary))}, byte_fallback=True, fuse_unk=True,
            merges=[tuple(one) for one in made["merges"]], unk_token="<unk>",
        )
    )  # fmt: skip
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<start_of_turn>", "<end_of_turn>"],
    )  # fmt: skip
    tokenizer.add_tokens(["<answer>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


TOKENIZERS = {
    "qwen2": lambda: split_by(_QWEN2, False),
    "llama-bpe": lambda: split_by(_LLAMA3, True),
    "dbrx": lambda: split_by(_LLAMA3, False),
    "tekken": lambda: split_by(_TEKKEN, True),
    "gpt-4o": lambda: split_by(_GPT4O, False),
    "pieces": lambda: of_pieces(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_splits_text_alike(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    assert splitting_of(tokenizer) == name
    llama_cpp = pytest.importorskip("llama_cpp")
    model = tiny("gemma3", vocabulary=len(tokenizer), **GGUF_SIZES["gemma3"])
    write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert theirs.detokenize(ids, special=True).decode() == text


def test_transformers_reads_pieces_alike(tmp_path):
    tokenizer = TOKENIZERS["pieces"]()
    model = tiny("gemma3", vocabulary=len(tokenizer), **GGUF_SIZES["gemma3"])
    write_gguf(tmp_path / "m.gguf", model, tokenizer, "f32", name="m")
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert again.tokenize(text) == tokenizer.tokenize(text)


@pytest.mark.parametrize(
    "ways",
    [
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),),
        (None, pre_tokenizers.Metaspace("▁", "first", False)),
    ],
)
def test_a_space_in_front_is_refused(ways):
    with pytest.raises(ExportError, match="treats spaces by .*which llama.cpp does otherwise"):
        splitting_of(of_pieces(*ways))
