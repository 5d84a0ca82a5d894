"""Rollouts by older weights: the right weights sample, the right ratio corrects, nothing is lost on the way.

Stops at any moment, resumes and kills of such runs are in test_loop_stop_and_go.py, two processes in
test_loop_processes.py.
"""

import json
import random
from dataclasses import replace

import pytest
import tiny_loop_episodes
import torch
from loop_runs import letters, make, press_stop, record, same, task, weights

import grpo_kit as kit
from examples import older_weights
from examples.older_weights import OlderWeights
from grpo_kit.engine.fast import EngineSample
from grpo_kit.loop.batch import generate
from grpo_kit.loop.processes import Stopped, rows_of_step
from grpo_kit.loop.protocols import Hook
from grpo_kit.record.files import read_metrics
from grpo_kit.schedules import linear
from grpo_kit.watch.monitor import read_flags


def clone(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Watch(Hook):
    """The policy as each step began, the weights that sampled, and the batch and gradient of each update."""

    def __init__(self):
        self.policy, self.sampled_by, self.batches, self.gradients = [], [], [], []

    def sampler(self, inner):
        def watched(model, tokenizer, task, rows, config, numbers):
            self.sampled_by.append((numbers.step, clone(model)))
            return inner(model, tokenizer, task, rows, config, numbers)

        return watched

    def begin(self, trainer):
        gradients = trainer.update.gradients

        def watched(model, *given):
            value = gradients(model, *given)
            self.gradients.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            return value

        trainer.update.gradients = watched

    def before_step(self, trainer):
        self.policy.append(clone(trainer.model))

    def after_step(self, trainer, row, batch):
        self.batches.append(batch)


def watched(folder, **options):
    """A run of that kind, trained; the trainer and what was seen."""
    watch = Watch()
    trainer = make(folder, hooks=[watch], watch=watch.sampler, **options)
    trainer.train()
    return trainer, watch


def ages(trainer):
    return read_metrics(trainer.folder)["rollout/age"].astype(int).tolist()


def scored(trainer, policy, batch, temperatures, graph=False):
    """log pi(token) by one plain forward a row: no packing, no cache. (N, T)"""
    now = clone(trainer.model)
    trainer.model.load_state_dict(policy, strict=False)
    rows = []
    for prompt, completion, temperature in zip(
        batch.prompt_ids, batch.completion_ids, temperatures, strict=True
    ):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.set_grad_enabled(graph):
            logits = (
                trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
                / temperature
            )
            row = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            rows.append(torch.nn.functional.pad(row, (0, batch.width - len(completion))))
    if not graph:
        trainer.model.load_state_dict(now, strict=False)
    return torch.stack(rows)


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_with_a_sync_each_step_it_is_the_loop_bit_for_bit(seams, tmp_path):
    plain = make(tmp_path / "a", seams=seams)
    plain.train()
    ours = make(tmp_path / "b", seams=seams, older={})
    ours.train()
    assert same(weights(plain), weights(ours)) and ages(ours) == [0, 0, 0, 0]
    (rows, completions), (wanted, kept) = record(ours.folder), record(plain.folder)
    assert completions == kept
    assert [{k: v for k, v in row.items() if k != "rollout/age"} for row in rows] == wanted


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_sampler_has_the_weights_of_the_last_sync(tuning, tmp_path):
    trainer, watch = watched(
        tmp_path / "run", tuning=tuning, seams="fast", steps=5, older={"sync_every": 3}
    )
    assert [step for step, _ in watch.sampled_by] == [0, 1, 2, 3, 4]
    for step, sampler in watch.sampled_by:
        assert same(sampler, watch.policy[step // 3 * 3]), step
        assert same(sampler, watch.policy[step]) == (step % 3 == 0)
    assert ages(trainer) == [0, 1, 2, 0, 1]


BUFFERS = [
    {"sync_every": 3},
    {"buffer": "fifo", "lead": 2},
    {"sync_every": 3, "buffer": "newest", "lead": 2},
]


@pytest.mark.parametrize("seams", ["plain", "fast"])
@pytest.mark.parametrize("older", BUFFERS, ids=str)
def test_old_log_probabilities_are_those_of_the_weights_that_sampled(older, seams, tmp_path):
    schedule = linear(1.2, 0.7)
    trainer, watch = watched(
        tmp_path / "run",
        steps=8,
        seams=seams,
        older=older,
        temperature=schedule,
        learning_rate=3e-3,
    )
    logged = ages(trainer)
    assert max(logged) >= 2 and len(watch.batches) == 8
    for step, (batch, age) in enumerate(zip(watch.batches, logged, strict=True)):
        assert (batch.old_logprobs is not None) == (age > 0)
        if not age:
            continue
        made = batch.extra.get(
            "temperature", [trainer.config.at(step).temperature] * len(batch)
        )
        if older.get("sync_every", 1) == 1:  # then the weights' step is the batch's own
            assert made == [trainer.config.at(step - age).temperature] * len(batch)
        mask = batch.mask().bool()
        wanted = scored(trainer, watch.policy[step - age], batch, made)
        assert torch.allclose(batch.old_logprobs[mask], wanted[mask], atol=1e-4), step
        drifted = scored(trainer, watch.policy[step], batch, made)
        assert not torch.allclose(wanted[mask], drifted[mask], atol=1e-3)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_the_gradient_is_the_clipped_ratios_by_hand(seams, corrected, tmp_path):
    older = {"sync_every": 3, "importance_weights": corrected}
    trainer, watch = watched(
        tmp_path / "run", steps=3, seams=seams, older=older, temperature=0.8
    )
    batch, gradient = watch.batches[2], watch.gradients[2]
    mask, advantages = batch.mask(), torch.tensor(batch.advantages)[:, None]
    mu = scored(trainer, watch.policy[0], batch, [0.8] * len(batch))
    trainer.model.zero_grad()
    now = scored(trainer, watch.policy[2], batch, [0.8] * len(batch), graph=True)
    ratio = torch.exp(now - (mu if corrected else now.detach()))
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    (-(terms * mask).sum() / mask.sum()).backward()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(gradient[name], parameter.grad, atol=1e-5, rtol=1e-3), name
    # the two losses differ here
    assert (read_metrics(trainer.folder)["clip_ratio"].iloc[2] > 0) == corrected


def test_fifo_waits_and_newest_first_does_not(tmp_path):
    steps, lead, found = 15, 3, {}
    for buffer in ("fifo", "newest"):
        found[buffer] = watched(
            tmp_path / buffer,
            steps=steps,
            learning_rate=1e-4,
            older={"buffer": buffer, "lead": lead},
        )
    fifo, newest = (ages(found[buffer][0]) for buffer in ("fifo", "newest"))
    made = [step - age for step, age in enumerate(fifo)]
    assert made == sorted(made)
    assert fifo[: lead + 1] == [0, 1, 2, 3]  # the head start: all by the first weights
    assert set(fifo[lead:]) == {lead - 1, lead, lead + 1}
    assert 0 < sum(newest) / steps < 1
    for trainer, watch in found.values():
        waiting = read_metrics(trainer.folder)["rollout/buffered"].astype(int).tolist()
        sampled = [step for step, _ in watch.sampled_by]
        assert (
            set(waiting) == {lead - 1, lead, lead + 1} and len(sampled) == steps + waiting[-1]
        )
        assert sampled.count(0) == lead + 1 and {
            sampled.count(step) for step in {*sampled} - {0}
        } == {1, 2}
    _, watch = found["newest"]
    sampled = {step for step, _ in watch.sampled_by}
    assert [age == 0 for age in newest] == [step in sampled for step in range(steps)]
    trainer, watch = found["fifo"]
    for place, batch in enumerate(watch.batches[: lead + 1]):  # other prompts each time
        assert batch.rows[::4] == rows_of_step(task().train, trainer.config, 0, place)


def test_a_batch_that_waited_has_its_own_rows_rewards_and_groups(tmp_path):
    trainer, watch = watched(tmp_path / "run", steps=8, older={"buffer": "newest", "lead": 2})
    table = read_metrics(trainer.folder)
    assert max(ages(trainer)) > 0
    for batch, reward in zip(watch.batches, table["reward"], strict=True):
        rendered = trainer.tokenizer(task().render(trainer.tokenizer, batch.rows))["input_ids"]
        assert [list(ids) for ids in rendered] == batch.prompt_ids
        assert batch.parts["letters"] == letters(batch.completions)
        assert reward == pytest.approx(sum(batch.rewards) / len(batch))
        assert batch.groups == [0] * 4 + [1] * 4
    assert table["num_tokens"].is_monotonic_increasing and not table["num_tokens"].isna().any()


def test_drift_of_old_rollouts_is_no_warning_and_the_options_are_on_record(tmp_path):
    """Without importance weights the gap to the sampler is the policy's own way since then."""
    fast = make(tmp_path / "unused", seams="fast").config
    fast.steps, fast.learning_rate = 6, 0.1
    own = make(tmp_path / "unused")
    sample = OlderWeights(sync_every=3, importance_weights=False)
    trainer = kit.GRPOTrainer(
        own.model,
        task(),
        fast,
        tokenizer=own.tokenizer,
        folder=tmp_path / "run",
        sample=sample,
        live=None,
    )
    trainer.train()
    assert isinstance(trainer.sample.inner, EngineSample) and sample.inner is None
    assert read_metrics(tmp_path / "run")["rollout/logprob_gap"].max() > 0.05
    assert "sampler gap" not in {flag.name for flag in read_flags(tmp_path / "run")}
    assert json.loads((tmp_path / "run/run.json").read_text())["sample"] == (
        "OlderWeights(sync_every=3, buffer=None, lead=0, importance_weights=False)"
    )


def test_one_object_serves_two_trainers_after_each_other(tmp_path):
    """As the arms of a lab do; nothing of the first run stays in it."""
    sample, found = OlderWeights(generate, sync_every=3, buffer="fifo", lead=2), []
    for name in ("a", "b"):
        trainer = make(tmp_path / name)
        trainer = kit.GRPOTrainer(
            trainer.model, task(), trainer.config, tokenizer=trainer.tokenizer, folder=tmp_path / name, sample=sample,
            live=None,
        )  # fmt: skip
        trainer.train()
        found.append(weights(trainer))
    assert same(*found)
    plain, given = make(tmp_path / "c"), make(tmp_path / "d", older={"sync_every": 2})
    plain.sample = OlderWeights(sync_every=2)  # in the loop alone the plain way is its own
    plain.train(), given.train()
    assert same(weights(plain), weights(given))


@pytest.mark.parametrize("where", ["inside", "on the way in", "on the way out"])
def test_a_stop_while_the_sampler_has_its_weights_leaves_the_policy_its_own(
    where, tmp_path, monkeypatch
):
    watch, calls = Watch(), []
    options = {"older": {"sync_every": 4}, "seams": "fast"}

    def sampler(inner):
        def sample(model, tokenizer, task, rows, config, numbers):
            if numbers.step == 2:
                calls.append(same(clone(model), watch.policy[0]))
                if where == "inside" and len(calls) == 1:
                    press_stop()
            return inner(model, tokenizer, task, rows, config, numbers)

        return sample

    trainer = make(tmp_path / "run", hooks=[watch], watch=sampler, **options)
    exchanged, seen = older_weights.weights_of, []

    class PressedInTheMiddle(dict):
        def items(self):
            if trainer.step == 2:
                seen.append(1)
            for place, pair in enumerate(super().items()):
                if place == 3 and len(seen) == {"on the way in": 2, "on the way out": 3}.get(
                    where
                ):
                    press_stop()
                yield pair

    monkeypatch.setattr(
        older_weights,
        "weights_of",
        lambda trained, older: exchanged(PressedInTheMiddle(trained), older),
    )
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert stopped.value.step == 2 and calls == ([] if where == "on the way in" else [True])
    assert same(clone(trainer.model), watch.policy[2]) and not same(
        watch.policy[0], watch.policy[2]
    )
    assert trainer.optimizer.param_groups[0]["params"][0] in {*trainer.model.parameters()}
    monkeypatch.undo()
    trainer.train()
    untouched = make(tmp_path / "untouched", **options)
    untouched.train()
    assert same(weights(trainer), weights(untouched))


def test_each_step_dropped_once_and_done_again_ends_as_if_never_stopped(tmp_path):
    """A reward that stops the run in each step, after the buffer has given its batch away."""
    options = {"sync_every": 3, "buffer": "newest", "lead": 2}
    untouched = make(tmp_path / "a", older=options, steps=6)
    untouched.train()
    stopped = set()

    class Once(Hook):
        def begin(self, trainer):
            inner = trainer.update.gradients

            def gradients(*given):
                if trainer.step not in stopped:
                    stopped.add(trainer.step)
                    press_stop()
                return inner(*given)

            trainer.update.gradients = gradients

        def end(self, trainer, error):
            del trainer.update.gradients

    trainer = make(tmp_path / "b", older=options, steps=6, hooks=[Once()])
    for _ in range(6):
        with pytest.raises(Stopped):
            trainer.train()
    trainer.train()
    assert same(weights(trainer), weights(untouched)) and record(tmp_path / "a") == record(
        tmp_path / "b"
    )


@pytest.mark.parametrize("older", BUFFERS, ids=str)
def test_resumed_in_a_new_process_it_ends_where_the_first_one_did(older, tmp_path):
    at = random.Random(str(older)).choice([4, 5])
    first = make(tmp_path / "a", older=older, steps=7)
    first.train()

    class Stop(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == at:
                press_stop()

    with pytest.raises(Stopped):
        make(tmp_path / "b", older=older, steps=7, hooks=[Stop()]).train()
    second = make(tmp_path / "b", older=older, steps=7)
    second.train(resume=True)
    assert same(weights(first), weights(second)) and record(tmp_path / "a") == record(
        tmp_path / "b"
    )


def test_a_cut_state_is_a_damaged_checkpoint(tmp_path):
    older = {"sync_every": 3, "buffer": "fifo", "lead": 1}
    whole = make(tmp_path / "run", older=older, save_steps=1, save_total_limit=4)
    whole.train()
    path = tmp_path / "run/checkpoint-4/sample_state.pt"
    path.write_bytes(path.read_bytes()[:-1])
    again = make(tmp_path / "run", older=older)
    again.train(resume=True)
    assert same(weights(whole), weights(again))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert 3 in [json.loads(line).get("resumed_from") for line in lines]


def test_going_on_with_another_sampler_is_refused(tmp_path):
    make(tmp_path / "a", steps=2, save_steps=2).train()
    with pytest.raises(ValueError, match=r"sample: None, now 'OlderWeights\(sync_every=4"):
        make(tmp_path / "a", older={"sync_every": 4}).train(resume=True)
    make(tmp_path / "b", steps=2, save_steps=2, older={"sync_every": 4}).train()
    with pytest.raises(
        ValueError,
        match=r"sample: 'OlderWeights\(sync_every=4.*, now 'OlderWeights\(sync_every=2",
    ):
        make(tmp_path / "b", older={"sync_every": 2}).train(resume=True)
    with pytest.raises(ValueError, match=r"sample: 'OlderWeights\(sync_every=4.*, now None"):
        make(tmp_path / "b").train(resume=True)


def test_episodes_wait_whole(tmp_path):
    """Turns keep their rows, rewards and advantages; a stop loses none."""

    def run(folder, hooks=()):
        trainer = tiny_loop_episodes.make(folder, steps=5, hooks=hooks)
        trainer.sample = OlderWeights(trainer.sample, sync_every=2, buffer="fifo", lead=2)
        trainer._sample_state = trainer.sample.state()
        return trainer

    seen = []

    class Look(Hook):
        def after_step(self, trainer, row, batch):
            seen.append((row, batch))
            if trainer.step == 3:
                press_stop()

    trainer = run(tmp_path / "a", [Look()])
    with pytest.raises(Stopped):
        trainer.train()
    second = run(tmp_path / "a")
    second.train(resume=True)
    first = run(tmp_path / "b")
    first.train()
    assert (
        same(weights(first), weights(second))
        and ages(first) == ages(second)
        and max(ages(first)) > 1
    )
    for row, batch in seen:
        assert row["episodes/turns"] and len(batch.extra["turn"]) == len(batch)
        for observation, own in zip(batch.extra["observation"], batch.rows, strict=True):
            assert observation.startswith(("Say " + own["question"], "You wrote"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2.5}, "sync_every=2.5"),
        ({"buffer": "lifo", "lead": 1}, "'newest'"),
        ({"buffer": "fifo"}, "lead=0"),
        ({"lead": 2}, "buffer=None"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        OlderWeights(**options)


def test_what_a_run_cannot_do_is_refused_in_words(tmp_path):
    buffer = {"buffer": "fifo", "lead": 1}
    with pytest.raises(
        ValueError, match="dynamic_sampling=2: a buffer serves a step one batch"
    ):
        make(tmp_path / "a", older=buffer, dynamic_sampling=2).train()
    trainer = make(tmp_path / "b", older=buffer)
    sample, given = trainer.sample, (trainer.model, trainer.tokenizer, trainer.task)
    with pytest.raises(ValueError, match="this run has several; start one"):
        sample(*given, trainer.task.train[:1], trainer.config, trainer.config.at(0))
    with pytest.raises(
        ValueError, match="step 5 samples with the weights of step 4, which are not here"
    ):
        OlderWeights(generate, sync_every=4)(
            *given, trainer.task.train[:2], trainer.config, trainer.config.at(5)
        )


def test_groups_drawn_anew_are_sampled_with_the_same_older_weights(tmp_path):

    def seldom(completions, **columns):
        return [float(len(text) % 4 == 0) for text in completions]

    own = replace(task(), rewards=[seldom], reward_weights=[1.0])
    trainer, watch = watched(
        tmp_path / "run", older={"sync_every": 3}, dynamic_sampling=2, task=own
    )
    assert len(watch.sampled_by) > 4
    assert all(same(sampler, watch.policy[step // 3 * 3]) for step, sampler in watch.sampled_by)
    assert [batch.old_logprobs is not None for batch in watch.batches] == [
        False,
        True,
        True,
        False,
    ]
