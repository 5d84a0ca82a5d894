"""A task of several turns is evaluated, asked whether it is ready, and compared as any other is."""

from dataclasses import asdict

import pytest
import torch

from grpo_kit.evaluation.accuracy import Evaluation, evaluate
from grpo_kit.evaluation.comparison import compare
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.evaluation.readiness import Readiness, readiness
from grpo_kit.models import load_policy
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import View
from grpo_kit.trainer.held_out import HeldOut


class Vowels:
    """Pays a third a turn for a vowel in what was written; over after three turns."""

    actions = ("a", "x")

    def reset(self, row):
        self.left, self.invalid = 3, False
        return f"Say something about {row['question']}."

    def step(self, text):
        self.left -= 1
        self.invalid = "d" not in text
        return (
            f"{self.left} to go",
            round(1 / 3, 6) * any(c in "aeiou" for c in text),
            self.left == 0,
        )


def task(**options):
    rows = [{"question": f"thing {i}"} for i in range(12)]
    return EpisodeTask(
        "vowels", rows[:6], rows[6:], Vowels, max_turns=3, max_completion_tokens=3, success=0.99,
        actions=Vowels.actions, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny-random", quiet=True)


@pytest.mark.parametrize("view", [View(), View(chat=True)], ids=["actions", "chat"])
def test_completions_are_those_of_the_prompts_shown(view, policy):
    """Greedy, turn by turn, by the plain model without a cache: the same tokens."""
    model, tokenizer = policy
    made = answer(model, tokenizer, task(view=view))
    assert len(made.episodes) == 6 and all(len(e.turns) == 3 for e in made.episodes)
    for episode in made.episodes[:2]:
        for turn in episode.turns:
            ids = list(turn.prompt_ids)
            for token in turn.completion_ids:
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[0, -1]
                assert int(logits.argmax()) == token
                ids.append(token)


def test_batch_size_changes_no_completion(policy):
    model, tokenizer = policy
    how = dict(samples=2, temperature=1.0, seed=4)
    one, all_ = (
        answer(
            model, tokenizer, task(view=View(chat=True)), None, Decoding(batch_size=n, **how)
        )
        for n in (3, 64)
    )
    tokens = [
        [t.completion_ids for e in made.episodes for t in e.turns] for made in (one, all_)
    ]
    assert tokens[0] == tokens[1]
    assert len({str(ids) for ids in tokens[0]}) > 12  # samples of a row differ


def test_evaluation_has_success_reward_and_what_reads_nothing(policy, tmp_path):
    model, tokenizer = policy
    found = evaluate(model, tokenizer, task(), samples=4, k=(1, 4))
    right = [e.total >= 0.99 for e in answer(model, tokenizer, task()).episodes]
    assert found.strict.value == sum(right) / 6 and found.n == 6
    assert found.constant[0].startswith("always a") and found.constant[1] == 1.0
    assert found.rows["turns"].tolist() == [3] * 6 and "reward/episode_return" in found.rows
    assert "> " in found.rows["completion"][0]
    found.save(tmp_path / "e.json")
    loaded = Evaluation.load(tmp_path / "e.json")
    both = compare(found, loaded)
    assert found.lenient is None and loaded.lenient is None, (
        "the environment alone says what succeeds"
    )
    for shown in (found.table(), both.table()):
        assert [name for name in shown.index if "reward" not in name][:2] == [
            "strict",
            "formatted",
        ]
    assert "lenient" not in repr(both) and [
        t.get_text() for t in both.plot().axes[0].get_xticklabels()
    ] == [
        "strict",
        "formatted",
    ]


def test_readiness_counts_episodes_and_valid_actions(policy):
    model, tokenizer = policy
    found = readiness(model, tokenizer, task(), samples=4, group_size=4)
    assert found.n == 6 and sum(map(sum, (r.values() for r in found.rewards))) == 24
    made = answer(model, tokenizer, task(), None, Decoding(4, 1.0))
    valid = [[not turn.invalid for turn in e.turns] for e in made.episodes]
    share = sum(map(sum, valid)) / 72
    assert 0 < share < 0.5 and found.format_rate.value == pytest.approx(share)
    assert sum(made.formatted) == sum(map(all, valid)), "formatted: every action of the episode"
    assert found.reason.startswith(
        f"format first: {share:.0%} of an episode's actions are valid, below 50%. So"
    )
    assert "valid actions" in found.table().index and "lenient" not in str(found.table().index)
    assert Readiness.from_dict(asdict(found)).reason == found.reason
    assert found == readiness(
        model, tokenizer, task(), samples=4, group_size=4, seconds=None
    ), "2 + 4 rows are 6"


def test_held_out_episodes_are_measured(policy):
    measured = HeldOut(task(), rows=4).measure(*policy)
    assert (
        0 <= measured["accuracy_low"] <= measured["accuracy"] <= measured["accuracy_high"] <= 1
    )


def test_completions_of_turns_are_not_kept_in_files(policy, tmp_path):
    with pytest.raises(ValueError, match="completions of task 'vowels' are not kept"):
        answer(*policy, task(), folder=tmp_path)
