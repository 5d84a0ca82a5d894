"""Episodes of several turns as batches of the loop: the recorded steps, columns and metrics, advantages by hand."""

from collections import defaultdict

import pytest
import torch
from tiny_loop_episodes import Coin, make, policy, rolled_out, same, task, weights, written_as

from benchmarks.oracle.compare import worst
from benchmarks.oracle.loop import loop_steps
from benchmarks.oracle.step_runs import RUNS
from benchmarks.oracle.steps import compare_steps
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.score import with_signal
from grpo_kit.models._model_facts import context_length, end_ids
from grpo_kit.more.episodes._episode_sample import EpisodeSample, episode_measures, turns_of
from grpo_kit.more.episodes.environment import EpisodeError
from grpo_kit.more.episodes.observation import View
from grpo_kit.more.episodes.rollout_episodes import Episode, Turn

# ---- beside today's trainer -------------------------------------------------------------------------------------


class Packed:
    """PackedUpdate of the model that it is first called with."""

    def __init__(self, config):
        self.config, self.inner = config, None

    def _of(self, model):
        self.inner = self.inner or PackedUpdate(model, self.config)
        return self.inner

    def logprobs(self, model, *rest):
        return self._of(model).logprobs(model, *rest)

    def gradients(self, model, *rest):
        return self._of(model).gradients(model, *rest)


@pytest.mark.parametrize("update", [PaddedUpdate, Packed])
def test_the_recorded_turns_make_the_recorded_steps(update):
    run = RUNS["grid episodes"]
    differences = compare_steps(lambda run, forced: loop_steps(run, forced, update), runs=[run])
    failed = {d.what: d.error for d in differences if not d.passes}
    assert len(differences) > 60 and not failed, worst(differences)


@pytest.mark.parametrize(
    "view", [View(chat=True), View(actions=1)], ids=["chat", "one message"]
)
def test_metrics_are_counted_by_episode(view, tmp_path):
    batch = rolled_out(make(tmp_path / "run", "plain", of=task(view=view, max_turns=3)))
    extra, turns = batch.extra, defaultdict(list)
    for place, episode in enumerate(extra["episode"]):
        turns[episode].append(place)
    totals = [batch.rewards[places[0]] for places in turns.values()]
    assert totals == [
        pytest.approx(sum(extra["turn_reward"][p] for p in places)) for places in turns.values()
    ]
    success = sorted(totals)[len(totals) // 2]
    measured = episode_measures(batch, success=success, chat=view.chat)
    assert measured["episodes/turns"] == len(batch) / 8
    assert measured["episodes/invalid"] == pytest.approx(sum(extra["invalid"]) / len(batch))
    assert measured["episodes/success"] == sum(total >= success for total in totals) / 8
    assert (
        measured["episodes/unfinished"]
        == sum(not extra["done"][places[-1]] for places in turns.values()) / 8
    )
    groups = torch.tensor(totals).double().view(-1, 4)
    assert (
        measured["reward"]
        == measured["reward/episode_return"]
        == pytest.approx(groups.mean().item())
    )
    assert measured["reward_std"] == pytest.approx(groups.std(1).mean().item())
    assert len(batch) > len(totals) == 8 and 0 < measured["episodes/success"] < 1


# ---- by hand ----------------------------------------------------------------------------------------------------


# two episodes: "1", "." and "5", "5", "5" (the turn limit): totals 1 and 1.5; half their distance is 0.25
BY_HAND = {
    "episode": [-0.25, -0.25, 0.25, 0.25, 0.25],
    # from each turn on 1, 0 and 1.5, 1, 0.5; nobody to compare the third turn with
    "return": [-0.25, -0.5, 0.25, 0.5, 0.0],
    # the first turn alone has the same prompt in both
    "state": [-0.5, -0.25, 0.5, 0.25, 0.25],
}


@pytest.mark.parametrize("credit", BY_HAND)
def test_advantages_by_hand(credit, tmp_path):
    ids = {
        text: policy()[1](text, add_special_tokens=False)["input_ids"]
        for text in ("1", "5", ".")
    }
    turns = {0: [ids["1"], ids["."]], 1: [ids["5"]] * 3}
    sample = EpisodeSample(written_as(turns))
    trainer = make(
        tmp_path / "run",
        "plain",
        of=task(environment=Coin, rows=1, credit=credit),
        sample=sample,
        scale="none",
        prompts_per_step=1,
        group_size=2,
    )
    batch = rolled_out(trainer)
    assert batch.rewards == [1.0, 1.0, 1.5, 1.5, 1.5]
    assert batch.extra["turn_reward"] == [1.0, 0.0, 0.5, 0.5, 0.5]
    assert batch.extra["done"] == [False, True, False, False, False]
    assert batch.advantages == pytest.approx(BY_HAND[credit])
    assert trainer.sample.measures(batch, trainer.task)["episodes/unfinished"] == 0.5
    trainer.config.scale, trainer.config.positive_weight = "group", 2.0
    if credit == "episode":  # the spread of 1 and 1.5 with ddof=1 is 0.35355
        unit = 0.25 / (0.5 / 2**0.5 + 1e-4)
        assert rolled_out(trainer).advantages == pytest.approx([-unit] * 2 + [2 * unit] * 3)


def test_a_discount_counts_later_rewards_less(tmp_path):
    ids = {
        text: policy()[1](text, add_special_tokens=False)["input_ids"]
        for text in ("1", "5", ".")
    }
    sample = EpisodeSample(written_as({0: [ids["1"], ids["."]], 1: [ids["5"]] * 3}))
    trainer = make(
        tmp_path / "run",
        "plain",
        of=task(environment=Coin, rows=1, credit="return", discount=0.5),
        sample=sample,
        scale="none",
        prompts_per_step=1,
        group_size=2,
    )
    # from each turn on: 1, 0 and 0.5 + 0.25 + 0.125, 0.5 + 0.25, 0.5
    assert rolled_out(trainer).advantages == pytest.approx(
        [0.0625, -0.375, -0.0625, 0.375, 0.0]
    )


def test_turns_that_are_cut_off_are_told_from_those_that_ended(tmp_path):
    """The prompt of a turn behind one that ended holds no second end, and behind one that was cut off it has one."""
    model, tokenizer = policy()
    (end, *_), word = (
        end_ids(model, tokenizer),
        tokenizer("word", add_special_tokens=False)["input_ids"],
    )
    cut = (word * 6)[:6]
    turns, seen = {0: [cut, [*word, end], cut], 1: [[*word, end], cut, [end]]}, {}
    of = task(rows=1, view=View(chat=True, thoughts="kept"), turns=3)
    trainer = make(
        tmp_path / "run", "plain", of=of, sample=EpisodeSample(written_as(turns, seen)), prompts_per_step=1,
        group_size=2, mask_truncated_completions=True,
    )  # fmt: skip
    batch = rolled_out(trainer)
    assert batch.cut_off == [True, False, True, False, True, False]
    assert trainer.sample.measures(batch, trainer.task)["episodes/cut_off"] == 0.5
    assert batch.prompt_ids == [seen[i, t] for i in (0, 1) for t in (1, 2, 3)]
    for episode in (0, 1):
        for turn in (1, 2):
            before = [*seen[episode, turn], *turns[episode][turn - 1]]
            later = seen[episode, turn + 1]
            assert later[: len(before)] == before
            at_once = later[len(before)] == end
            assert at_once == (turns[episode][turn - 1][-1] != end)
    moved = weights(trainer)
    trainer.config.steps = 1
    trainer.train()
    assert not same(moved, weights(trainer))


def test_equal_totals_have_a_signal_where_credit_goes_by_turn():
    def episode(*rewards):
        return Episode(
            {"question": "?"},
            [Turn([1], [2], None, "", "", "", r, False, False) for r in rewards],
        )

    batch = turns_of([episode(1.0, 0.0), episode(0.0, 1.0), episode(1.0), episode(1.0)], 2)
    assert with_signal(batch) == []
    batch.advantages = [0.0, -0.5, 0.0, 0.5, 0.0, 0.0]
    assert with_signal(batch) == [0, 1, 2, 3]


def test_reread_is_what_a_fork_costs():
    def episode(*turns):
        made = [Turn(prompt, ids, None, "", "", "", 0.0, False, False) for prompt, ids in turns]
        return Episode({"question": "?"}, made)

    # the template writes another end than 9
    on = episode(([1, 2], [3, 9]), ([1, 2, 3, 4, 5], [6, 9]))
    dropped = episode(([1, 2, 7], [8, 3, 9]), ([1, 2, 3, 4, 7], [6, 9]))  # 7 opens a thought
    anew = episode(([1, 2, 3, 4], [5, 9]), ([0, 2, 3, 4, 5], [6, 9]))
    found = [
        episode_measures(turns_of([e], 1), success=1.0, chat=True) for e in (on, dropped, anew)
    ]
    assert [one["episodes/forked"] for one in found] == [0, 1, 1]
    assert [one["episodes/reread"] for one in found] == pytest.approx([0, 1 / 5, 4 / 5])


# ---- what cannot be ---------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_by_name(tmp_path):
    for how, said in (
        ({"credit": "turn"}, "credit='turn'"),
        ({"discount": 0.9}, "is not used by credit='episode'"),
        ({"discount": 1.5, "credit": "state"}, "must lie in"),
    ):
        with pytest.raises(ValueError, match=said):
            task(**how)
    with pytest.raises(
        ValueError, match="reward_weights=.* the environment's is the one reward"
    ):
        make(tmp_path / "a", reward_weights=[0.5]).train()
    trainer = make(tmp_path / "b")
    with pytest.raises(ValueError, match="the task has 1 rewards"):
        trainer.change(reward_weights=[0.5, 0.5])
    with pytest.raises(ValueError, match="EpisodeSample plays an EpisodeTask"):
        EpisodeSample()(
            trainer.model, trainer.tokenizer, object(), [], trainer.config, trainer.config.at(0)
        )
    short = task(view=View(write=lambda goal, actions, seen: "long " * 9000))
    with pytest.raises(
        EpisodeError, match=r"environment Letters, row 'row \d' .*, turn 1: the prompt"
    ):
        make(tmp_path / "c", of=short).train()
    # the run's length counts, not the task's
    with pytest.raises(EpisodeError, match="turn 1: the prompt"):
        make(tmp_path / "d", max_completion_tokens=context_length(trainer.model)).train()
