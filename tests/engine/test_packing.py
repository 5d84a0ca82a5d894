"""The packed layout: who sees whom, where scores lie, how groups are cut into chunks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

from grpo_kit.engine.packed_update import pack_rows
from grpo_kit.engine.tree import CHUNK_COST, make_chunks, tree_tokens
from grpo_kit.models import load_policy

CPU = torch.device("cpu")
ROWS = [((5, 6), [7, 8]), ((4,), [3, 2]), ((5, 6), [9])]


def test_layout_by_hand():
    packed = pack_rows(ROWS, CPU, multiple=8)
    assert packed.input_ids.tolist() == [[4, 3, 5, 6, 7, 6, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 1, 0, 0]]
    assert packed.labels.tolist() == [[3, 2, -100, 7, 8, 9, -100, -100]]
    sees = packed.dense_mask()[0, 0].int().tolist()
    assert sees[:6] == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 0, 0],
    ]
    assert sees[6] == [0, 0, 0, 0, 0, 0, 1, 0] and sees[7] == [0, 0, 0, 0, 0, 0, 0, 1]
    scores = torch.arange(8.0)[None]
    assert packed.unpack(scores, 2).tolist() == [[3, 4], [0, 1], [5, 0]]
    assert packed.unpack(scores, 3).tolist() == [[3, 4, 0], [0, 1, 0], [5, 0, 0]]


def test_the_block_mask_is_the_dense_mask(monkeypatch):
    """FlexAttention's own reference (not its CUDA kernel) gives the same hidden states and gradients."""
    rows = [
        ((5, 6, 7), [7, 8, 9, 10]),
        ((5, 6, 7), [11]),
        ((4, 20), [3, 2] * 80),
        ((4, 20), [9] * 9),
    ]
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    # else no backward on a CPU
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model = load_policy("tiny-random", quiet=True)[0].train()
    results = []
    for attention in ("sdpa", "flex_attention"):
        packed = pack_rows(rows, CPU, multiple=128)
        model.config._attn_implementation = attention
        mask = packed.dense_mask() if attention == "sdpa" else packed.block_mask()
        model.zero_grad()
        logits = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=False,
        ).logits
        used = logits[packed.labels != -100]
        used.logsumexp(-1).sum().backward()
        results.append(
            (used.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        )
    (dense, dense_grad), (flex, flex_grad) = results
    assert torch.allclose(dense, flex, atol=1e-5)
    assert torch.allclose(dense_grad, flex_grad, rtol=1e-4, atol=1e-6)


def test_the_block_mask_is_torchs():
    """Made from the ends of blocks, it lists the blocks that torch finds by looking at every pair."""
    draw = torch.Generator().manual_seed(0)
    number = lambda low, high: int(torch.randint(low, high, (), generator=draw))  # noqa: E731
    for _ in range(20):
        prompts = [tuple(number(1, 50) for _ in range(number(1, 200))) for _ in range(3)]
        rows = [
            (p, [number(1, 50) for _ in range(number(1, 200))])
            for p in prompts
            for _ in range(number(1, 5))
        ]
        packed = pack_rows(rows, CPU, multiple=128)
        made = packed.block_mask()
        wanted = create_block_mask(made.mask_mod, None, None, *made.seq_lengths, device="cpu")
        assert torch.equal(made.to_dense(), wanted.to_dense())
        for count, index in (
            ("kv_num_blocks", "kv_indices"),
            ("full_kv_num_blocks", "full_kv_indices"),
        ):
            found, lists = getattr(made, count), getattr(made, index)
            assert torch.equal(found, getattr(wanted, count))
            listed = torch.arange(lists.size(-1)) < found[..., None]
            assert torch.equal(lists[listed], getattr(wanted, index)[listed])


row = st.tuples(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 9), max_size=6),
)


@given(st.lists(row, min_size=1, max_size=12), st.integers(1, 30))
def test_chunks_hold_every_row_once_and_fit(rows, max_tokens):
    chunks = make_chunks(rows, max_tokens)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(rows)))
    for chunk in chunks:
        tokens = tree_tokens([rows[i] for i in chunk if rows[i][1]])
        assert tokens <= max_tokens or sum(bool(rows[i][1]) for i in chunk) == 1


def test_chunks_share_what_they_can():
    """A system text, two groups, unique completions: apart where memory asks for it, and there by group."""
    system = tuple(range(10, 50))
    rows = [((*system, 1), [n, n, n]) for n in range(3)] + [
        ((*system, 2), [n, n, n]) for n in range(3)
    ]
    assert make_chunks(rows, 1000) == [[0, 1, 2, 3, 4, 5]]
    assert make_chunks(rows, 55) == [[0, 1, 2], [3, 4, 5]]
    spread = [rows[i] for i in (0, 3, 1, 4, 2, 5)]
    assert make_chunks(spread, 55) == [[0, 2, 4], [1, 3, 5]]


def test_one_more_chunk_is_not_for_nothing():
    """Rows that share nothing go together: a chunk costs as much as CHUNK_COST tokens."""
    assert CHUNK_COST > 0
    assert make_chunks([((1, 2), [3]), ((4, 5), [6])], 100) == [[0, 1]]


def test_of_cuts_that_cost_the_same_the_most_even_one_is_taken_and_no_other():
    # 1,001 tokens each, nothing shared
    rows = [((10 * n, *range(1000)), [n]) for n in range(4)]
    assert make_chunks(rows, 3100) == [[0, 1], [2, 3]]
    many = [((10 * n, *range(3000)), [n]) for n in range(6)]
    # 18,000 tokens, one chunk where memory allows
    assert make_chunks(many, 10**6) == [[0, 1, 2, 3, 4, 5]]


def test_prompt_of_one_token_and_empty_completions():
    packed = pack_rows([((3,), []), ((3,), [4])], CPU)
    assert packed.input_ids.tolist() == [[3]] and packed.labels.tolist() == [[4]]
    assert packed.unpack(torch.tensor([[0.5]]), 1).tolist() == [[0.0], [0.5]]
    only_empty = pack_rows([((3,), [])], CPU)
    assert only_empty.input_ids.shape == (1, 1)
    assert only_empty.unpack(torch.ones(1, 1), 2).tolist() == [[0.0, 0.0]]
