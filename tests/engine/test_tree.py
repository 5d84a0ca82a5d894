"""The tree of shared prefixes against a plain set of prefixes, and attention over it against a dense mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.engine.cpu import _tree_attention as attention
from grpo_kit.engine.cpu._tree_attention import TreePlan, plan_blocks, tree_attention
from grpo_kit.engine.tree import build_tree

token = st.integers(1, 3)
row = st.tuples(st.lists(token, min_size=1, max_size=6), st.lists(token, max_size=6))
# Rows of few tokens often are, begin with or end inside one another; groups are made by hand besides.
rows = st.lists(row, min_size=1, max_size=10)


def prefixes(rows):
    """(distinct prefixes that are read, distinct prefixes that end in a scored token)"""
    read, scored = set(), set()
    for prompt, completion in rows:
        whole = tuple(prompt) + tuple(completion)
        read |= {whole[: i + 1] for i in range(len(prompt) + max(len(completion) - 1, 0))}
        scored |= {whole[: i + 1] for i in range(len(prompt), len(whole))}
    return read, scored


@given(rows)
def test_every_row_finds_its_tokens_positions_and_labels_and_sees_itself_alone(rows):
    tree = build_tree(rows)
    sees = tree.sees()
    for (prompt, completion), places in zip(rows, tree.places, strict=True):
        whole = list(prompt) + list(completion)
        count = len(prompt) + max(len(completion) - 1, 0)
        assert tree.input_ids[places].tolist() == whole[:count]
        assert tree.positions[places].tolist() == list(range(count))
        for i, query in enumerate(places):
            assert sees[query].nonzero()[:, 0].tolist() == places[: i + 1].tolist()
        scored = places[len(prompt) - 1 : len(whole) - 1]
        assert tree.labels[scored].tolist() == list(completion)


@given(rows)
def test_nothing_is_there_twice_but_tokens_with_several_labels(rows):
    tree = build_tree(rows)
    read, scored = prefixes(rows)
    labels = {}
    for prefix in scored:
        labels[prefix[:-1]] = labels.get(prefix[:-1], 0) + 1
    assert len(tree) == len(read) + sum(n - 1 for n in labels.values())
    assert (tree.labels != -100).sum() == len(scored)
    assert [t for s in tree.stretches for t in range(s.start, s.stop)] == list(range(len(tree)))


def test_layout_by_hand():
    """Two groups that share a system text; the second completion of the first is the first's beginning."""
    tree = build_tree(
        [([1, 2, 5], [7, 8]), ([1, 2, 5], [7]), ([1, 2, 6], [9, 9, 9]), ([1, 2, 6], [4])]
    )
    assert tree.input_ids.tolist() == [1, 2, 5, 7, 6, 6, 9, 9]
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 2, 3, 4]
    assert tree.labels.tolist() == [-100, -100, 7, 8, 4, 9, 9, 9]
    assert tree.end.tolist() == [8, 8, 4, 4, 5, 8, 8, 8]


def test_turns_of_an_episode_share_what_they_repeat():
    """A prompt that holds an earlier turn's completion reads it where that turn was scored."""
    first = ([1, 2, 3], [4, 5])
    second = ([1, 2, 3, 4, 5, 6], [7, 8])
    tree = build_tree([first, second])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.labels.tolist() == [-100, -100, 4, 5, -100, 7, 8]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"rows\[1\] has an empty prompt"):
        build_tree([([1], [2]), ([], [3])])


def test_long_chains_need_no_recursion():
    rows = [([1] * n, [2]) for n in range(1, 1500)]
    tree = build_tree(rows)
    assert len(tree) == 1499
    assert plan_blocks(tree.stretches)


def covered(plan, count):
    """How often each key is seen by each query."""
    seen = torch.zeros(count, count, dtype=torch.int)
    for block in plan.blocks:
        part = torch.ones(block.last - block.first, block.stop - block.start, dtype=torch.int)
        if block.kind == "causal":
            part = part.tril()
        if block.kind == "masked":
            part = (plan.bias(block, torch.float32)[0, 0] == 0).int()
        seen[block.first : block.last, block.start : block.stop] += part
    return seen


def dense(query, key, value, sees, scale):
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)) * scale
    return (scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value).transpose(1, 2)


groups = st.lists(
    st.tuples(
        st.lists(token, min_size=1, max_size=30),
        st.lists(st.lists(token, max_size=20), max_size=5),
    ),
    min_size=1,
    max_size=4,
)


@given(
    groups,
    st.sampled_from([0, 30, 3000]),
    st.sampled_from([4, 16, 256]),
    st.sampled_from([(4, 2), (3, 1)]),
)
def test_attention_and_its_gradient_are_those_of_a_dense_mask(groups, call, largest, heads):
    """In float64: blockwise is exact, for any plan."""
    rows = [
        (prompt, completion)
        for prompt, completions in groups
        for completion in [[], *completions]
    ]
    tree = build_tree(rows)
    before = attention._CALL, attention._LARGEST
    attention._CALL, attention._LARGEST = call, largest
    try:
        plan = TreePlan(tree)
    finally:
        attention._CALL, attention._LARGEST = before
    assert (covered(plan, len(tree)) == tree.sees().int()).all()
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, n, len(tree), 8, dtype=torch.float64, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    got = tree_attention(query, key, value, plan, 0.3)
    wanted = dense(query, key, value, tree.sees(), 0.3)
    assert torch.allclose(got, wanted, atol=1e-12, rtol=0)
    upstream = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad(got, (query, key, value), upstream),
        torch.autograd.grad(wanted, (query, key, value), upstream),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)
