"""The parts of the engine on their own: attention in two parts, slots, ends, graphs' signature."""

import pytest
import torch
from rollout_models import config, ragged_prompts, tiny_model

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._attention import attend, attend_fused, join
from grpo_kit.engine._decode import Decoder, EndWatch, OutputBuffer
from grpo_kit.engine._kv_cache import fill_holes, row_bucket
from grpo_kit.engine._supported_models import signature
from grpo_kit.engine.rollout import halve
from grpo_kit.engine.sampling import Sampled


@pytest.mark.parametrize("function", [attend, attend_fused])
def test_two_parts_joined_are_attention_over_all_keys(function):
    torch.manual_seed(0)
    query = 3 * torch.randn(2, 3, 5, 16)
    key, value = torch.randn(2, 2, 3, 21, 16)
    bias = torch.zeros(2, 1, 1, 14)
    bias[1, ..., 9:] = -torch.inf  # the second prompt is shorter
    whole = torch.cat([bias, torch.zeros(2, 1, 1, 7)], -1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=whole, scale=0.3
    )
    first = function(query, key[:, :, :14], value[:, :, :14], 0.3, bias)
    second = function(query, key[:, :, 14:], value[:, :, 14:], 0.3)
    assert torch.allclose(join(first, second), wanted, atol=1e-5)
    assert not torch.allclose(join(second, first)[0], first[0][0], atol=1e-2)


def test_holes_are_filled_from_the_end():
    assert fill_holes([True, True]) == [] == fill_holes([False, False])
    for pattern in range(1, 256):
        live = [bool(pattern >> i & 1) for i in range(8)]
        slots = list(range(8))
        for to, source in fill_holes(live):
            assert not live[to] and live[source]
            slots[to] = source
        assert sorted(slots[: sum(live)]) == [i for i in range(8) if live[i]]


def test_row_buckets_hold_and_waste_little():
    for n in range(1, 300):
        assert n <= row_bucket(n) <= max(1.5 * n, n + 1)
    assert len({row_bucket(n) for n in range(1, 129)}) == 14


def test_halves_keep_prompts_whole_while_there_are_several():
    prompts = [[1]] * 3 + [[2]] * 2 + [[3]]
    assert halve([0, 1, 2, 3, 4, 5], prompts) == [[0, 1, 2], [3, 4, 5]]
    assert halve([3, 4, 5], prompts) == [[3, 4], [5]]
    assert halve([0, 1, 2], prompts) == [[0], [1, 2]]


def linear_shapes(model, prompts, *, bucketed=False, **options):
    """(rows, positions) that each forward put through a linear layer, one completion of 12 tokens at most."""
    seen = []
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(inputs[0].shape[:2]))
    )
    engine = RolloutEngine(model)
    engine._decoder.bucketed = bucketed
    engine.generate(prompts, config(max_new_tokens=12, do_sample=True), seed=0, **options)
    hook.remove()
    return seen


def test_ended_rows_are_not_computed_and_prompts_only_once():
    model = tiny_model()
    prompts = ragged_prompts()
    lengths = [4, 9, 2, 6, 1, 5, 8, 3, 7, 7]

    def force(input_ids, scores, rows):
        """Row r stops after lengths[r] tokens."""
        step = input_ids.size(1) - max(map(len, prompts))
        end = step + 1 >= torch.tensor(lengths)[rows]
        scores = scores.clone()
        scores[:, 2] = torch.where(end, torch.inf, -torch.inf)
        return scores.masked_fill(
            end[:, None] & (torch.arange(scores.size(1)) != 2), -torch.inf
        ).clamp(max=1e4)

    seen = linear_shapes(model, prompts, processors=[force])
    assert seen[:4] == [(1, 9), (1, 3), (1, 14), (1, 1)]  # prompts, exact, once each
    assert [rows for rows, _ in seen[4:]] == [
        sum(n > step for n in lengths) for step in range(1, 9)
    ]
    assert all(width == 1 for _, width in seen[4:])
    bucketed = linear_shapes(model, prompts, bucketed=True, processors=[force])
    assert bucketed[0] == (4, 14)  # prompts in one padded batch
    assert {rows for rows, _ in bucketed[1:]} <= {1, 2, 3, 4, 6, 8, 12} and bucketed[1] == (
        12,
        1,
    )


def test_bucketed_decoding_uses_few_shapes_and_prefills_in_batches():
    model = tiny_model()
    settings = config(max_new_tokens=130, do_sample=True, eos_token_id=list(range(2, 12)))
    shapes = []
    forward = Decoder._forward

    class Watched(Decoder):
        def _forward(self):
            shapes.append((self.slots.rows, self.slots.width))
            return forward(self)

    engine = RolloutEngine(model)
    engine._decoder = Watched(model, bucketed=True)
    prompts = ragged_prompts()
    bucketed = engine.generate(prompts, settings, seed=0).completion_ids
    assert set(shapes) <= {(n, w) for n in (1, 2, 3, 4, 6, 8, 12) for w in (64, 128, 130)}
    assert 1 < len(set(shapes)) < 12 and len(shapes) > 20
    assert bucketed == RolloutEngine(model).generate(prompts, settings, seed=0).completion_ids
    held = engine._decoder.slots
    # reused, not grown
    assert engine.generate(prompts[:4], settings, seed=1) and engine._decoder.slots is held
    exact = RolloutEngine(model).generate(prompts[:4], settings, seed=1).completion_ids
    assert engine.generate(prompts[:4], settings, seed=1).completion_ids == exact


def test_tape_cuts_behind_the_first_stop():
    tape = OutputBuffer(
        [[5, 6], [7]], 4, stop_ids=[2, 9], stop_text=None, pad_id=0, device=torch.device("cpu")
    )
    rows = torch.tensor([1, 0])  # slots hold the rows in another order
    for step, tokens in enumerate([[3, 4], [9, 4], [2, 4], [3, 2]]):
        number = torch.full((2,), float(step))
        tape.write(step, rows, Sampled(torch.tensor(tokens), number, number + 10, number + 20))
    assert tape.input_ids.tolist() == [[5, 6, 4, 4, 4, 2], [0, 7, 3, 9, 2, 3]]
    assert tape.so_far(rows, 1).tolist() == [[0, 7, 3], [5, 6, 4]]
    first, second = tape.read()
    assert first == ([4, 4, 4, 2], [0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23])
    assert second == ([3, 9], [0, 1], [10, 11], [20, 21])
    assert tape.done.tolist() == [True, True]


def test_a_lagging_watch_shows_an_older_state_and_never_a_wrong_one():
    done = torch.tensor([False, False])
    watch = EndWatch(done, every=2)
    seen = []
    for step in range(6):
        if step == 1:
            done[1] = True
        seen.append(watch.look(step))
    assert seen == [None, None, [False, False], None, [False, True], None]


def test_signature_changes_with_what_a_graph_depends_on_and_only_then():
    model = tiny_model(lora=True)
    before = signature(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # an optimizer step
    assert signature(model) == before
    with model.disable_adapter():
        assert signature(model) != before
    assert signature(model) == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(model) != before
    model.merge_adapter()
    assert signature(model) != before
    model.unmerge_adapter()
    assert signature(model) == before
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling["default"] *= 2
    assert signature(model) != before
    layer.scaling["default"] /= 2
    assert signature(model) == before
    layer.base_layer.weight.data = layer.base_layer.weight.data.clone()
    assert signature(model) != before
    moved = signature(model)
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    assert signature(model) != moved
    tiny = tiny_model()
    before = signature(tiny)
    assert signature(tiny.to(torch.bfloat16)) != before
