"""Positives against negatives, and groups without a signal replaced: by hand, and by trl's own loss."""

import pytest
import tiny_run
import torch
from datasets import IterableDataset
from tiny_run import BOTH, data, interrupted_once, same, weights

from grpo_kit.objectives import weigh_advantages
from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.training.draw_rows import draw_rows
from grpo_kit.training.dynamic_sampling import PositivesTrainer, groups_with_signal, join_groups


def make(folder, *, kit=None, **overrides):
    """A PositivesTrainer on the tiny model that remembers what its updates were given and gave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BOTH, "kit", PositivesTrainer)
        trainer = tiny_run.make("kit", folder, kit=kit, **overrides)
    inner, trainer.updates = trainer.update.step, []

    def step(model, window):
        before = weights(trainer)
        loss = inner(model, window)
        gradient = {n: p.grad.clone() for n, p in model.named_parameters()}
        trainer.updates.append((before, window[0], loss, gradient))
        return loss

    trainer.update.step = step
    return trainer


def one_in_four(completions, **columns):
    """The first of every group of four is right."""
    return [float(i % 4 == 0) for i in range(len(completions))]


def three_prompts_can_be_solved(completions, answer, **columns):
    return [float(a in ("1", "4", "6") and i % 4 == 0) for i, a in enumerate(answer)]


def none_can(completions, **columns):
    return [0.0] * len(completions)


def extra(folder, name):
    return read_metrics(folder)[name].tolist()


def loss_of_trl(folder, update, **overrides):
    """trl's own loss and gradient of the batch that an update was given."""
    before, micro, _, _ = update
    plain = tiny_run.make("plain", folder, **overrides)
    plain.model.load_state_dict(before, strict=False)
    plain.model.train()
    plain.current_gradient_accumulation_steps = 1
    loss = plain._compute_loss(plain.model, micro)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in plain.model.named_parameters()}


def test_weights_of_one_and_no_group_to_replace_are_the_kits_trainer_bit_for_bit(tmp_path):
    plain = tiny_run.make("kit", tmp_path / "a")
    plain.train()
    ours = make(tmp_path / "b", kit={"resample": 2})  # letters() varies in every group
    ours.train()
    assert same(weights(plain), weights(ours))
    assert extra(tmp_path / "b", "rollout/extra_completions") == [0, 0, 0, 0]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_weights_reach_the_gradient_and_nothing_else(loss_type, tmp_path):
    kit = {"positive_weight": 3.0, "negative_weight": 0.0}
    trainer = make(tmp_path / "a", rewards=one_in_four, kit=kit, max_steps=1, loss_type=loss_type)
    trainer.train()
    (update,) = trainer.updates
    _, micro, loss, gradient = update
    # mean 1/4, standard deviation (ddof 1) 1/2: trl's advantages are 3/4 / 0.5001 and -1/4 / 0.5001
    assert sorted(micro["advantages"].tolist()) == pytest.approx([0.0] * 6 + [3 * 0.75 / 0.5001] * 2)
    assert extra(tmp_path / "a", "update/skipped") == [0.75]
    assert (
        micro["num_items_in_batch"] == micro["completion_mask"].sum()
    )  # weight 0 still counts below the line
    wanted, gradients = loss_of_trl(tmp_path / "b", update, loss_type=loss_type)
    assert torch.allclose(loss, wanted, atol=1e-6)
    for name, parameter in gradients.items():
        assert torch.allclose(gradient[name], parameter, atol=1e-5, rtol=1e-3), name
    logged = read_completions(tmp_path / "a")["advantage"]
    assert sorted(logged)[0] == pytest.approx(-0.25 / 0.5001)  # as it was before the weights


def test_groups_without_spread_are_replaced_and_the_cost_is_counted(tmp_path):
    trainer = make(
        tmp_path / "a", rewards=three_prompts_can_be_solved, kit={"resample": 8}, max_completion_length=9
    )
    trainer.train()
    costs = extra(tmp_path / "a", "rollout/extra_completions")
    sampled = read_completions(tmp_path / "a").groupby("step")
    assert costs == (sampled.size() - 8).tolist() and sum(costs) > 0 and max(costs) < 64
    table = read_metrics(tmp_path / "a")
    first = sampled.head(8).groupby("step")["reward"].mean()  # of all rounds it would be too high
    assert table["reward"].to_numpy() == pytest.approx(first.to_numpy())
    assert any(first != sampled["reward"].mean()) and table["num_tokens"].is_monotonic_increasing
    second = sampled.nth(slice(8, 16)).groupby("step")["prompt"].agg(frozenset)
    assert len(set(second)) == len(second) > 1  # other prompts at each step
    assert max(extra(tmp_path / "a", "rollout/logprob_gap")) < 1e-4  # rows still belong to their prompts
    for _, micro, _, _ in trainer.updates:
        assert micro["advantages"].tolist().count(pytest.approx(0.75 / 0.5001)) == 2
        assert (micro["advantages"] < 0).sum() == 6
        assert micro["num_items_in_batch"] == micro["completion_mask"].sum()
    resampled = max(range(4), key=lambda step: costs[step])
    loss, gradients = loss_of_trl(tmp_path / "b", trainer.updates[resampled])
    assert torch.allclose(trainer.updates[resampled][2], loss, atol=1e-6)
    for name, parameter in gradients.items():
        assert torch.allclose(trainer.updates[resampled][3][name], parameter, atol=1e-5, rtol=1e-3), name


def test_where_nothing_is_ever_solved_the_rounds_end_and_the_weights_stay(tmp_path):
    trainer = make(tmp_path, rewards=none_can, kit={"resample": 2}, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))
    assert extra(tmp_path, "rollout/extra_completions") == [16, 16]
    assert all(len(micro["advantages"]) == 8 for _, micro, _, _ in trainer.updates)


def test_the_cost_is_that_of_the_whole_step(tmp_path):
    options = dict(gradient_accumulation_steps=2, steps_per_generation=1, max_steps=1)
    make(tmp_path, rewards=none_can, kit={"resample": 2}, **options).train()
    assert extra(tmp_path, "rollout/extra_completions") == [32]
    assert len(read_completions(tmp_path)) == 48


def test_equal_rewards_that_round_are_no_spread(tmp_path):
    trainer = make(
        tmp_path,
        rewards=lambda completions, **columns: [0.1] * len(completions),
        kit={"resample": 2},
        num_generations=8,
        max_steps=1,
    )
    trainer.train()
    ((_, micro, _, _),) = trainer.updates
    assert micro["advantages"].ne(0).any()  # a rest of rounding, the same for all
    assert groups_with_signal(micro["advantages"], 8) == []
    assert extra(tmp_path, "rollout/extra_completions") == [16]


def test_stopped_and_gone_on_is_as_if_never_stopped(tmp_path):
    options = dict(rewards=three_prompts_can_be_solved, kit={"resample": 3, "positive_weight": 2.0})
    untouched = make(tmp_path / "a", **options)
    untouched.train()
    trainer = make(tmp_path / "b", **options)
    interrupted_once(trainer, "backward", at_step=2)
    trainer.train(on_stop="return")
    assert trainer.interrupted
    trainer.train(on_stop="return")
    assert same(weights(untouched), weights(trainer))


def test_weights_and_groups_with_spread_by_hand():
    advantages = torch.tensor([1.5, -0.5, 0.0, 0.0, 0.0, -2.0])
    assert weigh_advantages(advantages, 2, 0.5).tolist() == [3.0, -0.25, 0.0, 0.0, 0.0, -1.0]
    assert weigh_advantages(advantages, 1, 1).tolist() == advantages.tolist()
    assert groups_with_signal(advantages, 2) == [0, 2]


def test_joined_groups_keep_their_rows_and_are_padded_as_prompts_and_completions_are():
    def batch(prompt, completion, advantage):
        rows = len(advantage)
        return {
            "prompt_ids": torch.tensor([prompt] * rows),
            "prompt_mask": torch.ones(rows, len(prompt), dtype=torch.long),
            "completion_ids": torch.tensor(completion),
            "completion_mask": torch.tensor(completion).ne(9).long(),
            "sampling_per_token_logps": -torch.tensor(completion).float(),
            "advantages": torch.tensor(advantage),
            "num_items_in_batch": torch.tensor(-1),
        }

    first = batch([1, 2, 3], [[5, 9], [6, 6], [7, 7], [8, 9]], [0.0, 0.0, 1.0, -1.0])
    second = batch([4], [[5, 5, 5], [6, 9, 9]], [2.0, -2.0])
    joined = join_groups([first, second], [(0, 1), (1, 0)], 2, pad_id=9)
    assert joined["prompt_ids"].tolist() == [[1, 2, 3], [1, 2, 3], [9, 9, 4], [9, 9, 4]]
    assert joined["prompt_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert joined["completion_ids"].tolist() == [[7, 7, 9], [8, 9, 9], [5, 5, 5], [6, 9, 9]]
    assert joined["completion_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert joined["sampling_per_token_logps"][0].tolist() == [-7, -7, 0]
    assert joined["advantages"].tolist() == [1, -1, 2, -2] and joined["num_items_in_batch"] == 7
    with pytest.raises(ValueError, match="pixel_values"):
        join_groups([{**first, "pixel_values": torch.zeros(4)}], [(0, 0)], 2, pad_id=9)


def test_drawn_rows_are_distinct_repeated_and_the_same_each_time():
    rows = draw_rows(data(8), 5, 3, seed=1, name="a")
    assert rows == draw_rows(data(8), 5, 3, seed=1, name="a") and len(rows) == 15
    assert rows[0] == rows[2] != rows[3] and len({row["answer"] for row in rows}) == 5
    others = [draw_rows(data(8), 5, 3, seed=2, name="a"), draw_rows(data(8), 5, 3, seed=1, name="b")]
    assert rows not in others
    with pytest.raises(ValueError, match="prompts=9"):
        draw_rows(data(8), 9, 1, seed=1, name="a")


@pytest.mark.parametrize(
    ("kit", "overrides", "words"),
    [
        ({"positive_weight": -1.0}, {}, "positive_weight=-1.0"),
        ({"negative_weight": float("nan")}, {}, "negative_weight=nan"),
        ({"positive_weight": None}, {}, "positive_weight=None"),
        ({"resample": -1}, {}, "resample=-1"),
        ({"resample": 1.5}, {}, "resample=1.5"),
        ({"resample": 1}, {"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"resample": 1}, {"multi_objective_aggregation": "normalize_then_sum"}, "normalize_then_sum"),
        ({"resample": 1}, {"dataset": "iterable"}, "IterableDataset"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(kit, overrides, words, tmp_path):
    if overrides.get("dataset") == "iterable":
        overrides = {"dataset": IterableDataset.from_generator(lambda: iter(data().to_list()))}
    with pytest.raises(ValueError, match=words):
        make(tmp_path, kit=kit, **overrides)
