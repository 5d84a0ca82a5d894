"""Rollouts by older weights: the right weights sample, the right ratio corrects, nothing is lost on the way."""

import json

import pytest
import tiny_run
import torch
from datasets import IterableDataset
from tiny_run import BOTH, data, interrupted_once, press_stop, same, weights
from transformers import TrainerCallback

from grpo_kit.record.files import read_completions, read_metrics
from grpo_kit.schedules import linear
from grpo_kit.training.off_policy import OffPolicyTrainer


def make(folder, *, trainer=OffPolicyTrainer, kit=None, **overrides):
    """An OffPolicyTrainer on the tiny model; `kit` holds its options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BOTH, "kit", trainer)
        return tiny_run.make("kit", folder, kit=kit, **overrides)


def clone(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


class Watch(TrainerCallback):
    """The policy as each step began, the weights that sampled, and what the update was given and gave."""

    def __init__(self, trainer):
        self.trainer, self.policy, self.sampled_by, self.updates = trainer, [], [], []
        self._wrap(trainer.sampling, "with_engine", self.sampler)
        self._wrap(trainer.update, "step", self.update)
        trainer.add_callback(self)

    @staticmethod
    def _wrap(owner, name, watcher):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args: watcher(inner, *args))

    def on_step_begin(self, args, state, control, **kwargs):
        self.policy.append(clone(self.trainer))

    def sampler(self, inner, prompt_ids):
        self.sampled_by.append((self.trainer.state.global_step, clone(self.trainer)))
        return inner(prompt_ids)

    def update(self, inner, model, window):
        loss = inner(model, window)
        gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.updates.append((self.trainer.temperature, window, loss, gradient))
        return loss


def ages(folder):
    return read_metrics(folder)["rollout/age"].tolist()


def test_synchronous_it_is_the_kits_trainer_bit_for_bit(tmp_path):
    plain = tiny_run.make("kit", tmp_path / "a")
    plain.train()
    ours = make(tmp_path / "b")
    ours.train()
    assert same(weights(plain), weights(ours))
    assert ages(tmp_path / "b") == [0, 0, 0, 0]
    a, b = read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")
    for column in (
        "loss",
        "reward",
        "reward_std",
        "entropy",
        "completion_length",
        "num_tokens",
        "temperature",
    ):
        assert a[column].equals(b[column]), column


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_sampler_has_the_weights_of_the_last_sync(tuning, tmp_path):
    trainer = make(tmp_path, tuning=tuning, max_steps=5, kit={"sync_every": 3})
    watch = Watch(trainer)
    trainer.train()
    assert [step for step, _ in watch.sampled_by] == [0, 1, 2, 3, 4]
    for step, sampler in watch.sampled_by:
        assert same(sampler, watch.policy[step // 3 * 3]), step
        assert same(sampler, watch.policy[step]) == (step % 3 == 0)
    assert ages(tmp_path) == [0, 1, 2, 0, 1]


BUFFERS = [
    {"sync_every": 3},
    {"buffer": "fifo", "lead": 2, "temperature": linear(1.2, 0.7)},
    {"sync_every": 3, "buffer": "newest", "lead": 2},
]


def scored(trainer, policy, micro, temperature):
    """log pi(token) by one plain forward a row: no packing, no cache."""
    now = clone(trainer)
    trainer.model.load_state_dict(policy, strict=False)
    rows = []
    for i in range(len(micro["completion_ids"])):
        prompt = micro["prompt_ids"][i][micro["prompt_mask"][i].bool()]
        completion = micro["completion_ids"][i]
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        rows.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    trainer.model.load_state_dict(now, strict=False)
    return torch.stack(rows)


@pytest.mark.parametrize("options", BUFFERS, ids=str)
def test_old_log_probabilities_are_those_of_the_weights_that_sampled(options, tmp_path):
    trainer = make(tmp_path, max_steps=8, kit=options)
    watch = Watch(trainer)
    trainer.train()
    logged = ages(tmp_path)
    assert max(logged) >= 2 and len(watch.updates) == 8
    for step, (temperature, window, _, _) in enumerate(watch.updates):
        (micro,), age = window, int(logged[step])
        assert ("old_per_token_logps" in micro) == (age > 0)
        wanted = scored(trainer, watch.policy[step - age], micro, temperature)
        mask = micro["completion_mask"].bool()
        assert torch.allclose(micro["sampling_per_token_logps"][mask], wanted[mask], atol=1e-4), step
        if age:
            assert torch.equal(micro["old_per_token_logps"], micro["sampling_per_token_logps"])
            drifted = scored(trainer, watch.policy[step], micro, temperature)
            assert not torch.allclose(wanted[mask], drifted[mask], atol=1e-3)


@pytest.mark.parametrize("corrected", [True, False])
def test_loss_and_gradient_are_trls_own_with_those_log_probabilities(corrected, tmp_path):
    trainer = make(
        tmp_path / "a", max_steps=3, kit={"sync_every": 3, "importance_weights": corrected}, temperature=0.8
    )
    watch = Watch(trainer)
    trainer.train()
    _, (micro,), loss, gradient = watch.updates[2]
    mask = micro["completion_mask"].bool()
    plain = tiny_run.make("plain", tmp_path / "b", temperature=0.8)
    plain.model.load_state_dict(watch.policy[2], strict=False)
    plain.model.train()
    plain.current_gradient_accumulation_steps = 1
    batch = {k: v for k, v in micro.items() if k != "old_per_token_logps"}
    if corrected:
        batch["old_per_token_logps"] = scored(trainer, watch.policy[0], micro, 0.8) * mask
    wanted = plain._compute_loss(plain.model, batch)
    wanted.backward()
    assert torch.allclose(loss, wanted.detach(), atol=1e-5)
    clipped = plain._metrics["train"]["clip_ratio/region_mean"][-1]
    assert (clipped > 0) == corrected  # the two losses differ here
    for name, parameter in plain.model.named_parameters():
        assert torch.allclose(gradient[name], parameter.grad, atol=1e-5, rtol=1e-3), name


def test_fifo_waits_and_newest_first_does_not(tmp_path):
    steps, lead = 15, 3
    for buffer in ("fifo", "newest"):
        trainer = make(
            tmp_path / buffer, max_steps=steps, learning_rate=1e-4, kit={"buffer": buffer, "lead": lead}
        )
        trainer.train()
    sizes = read_completions(tmp_path / "fifo").groupby(["step", "group"]).size()
    assert set(sizes) == {4}, "batches made in one step keep their groups apart"
    fifo, newest = ages(tmp_path / "fifo"), ages(tmp_path / "newest")
    made = [step - age for step, age in enumerate(fifo)]
    assert made == sorted(made) and fifo[: lead + 1] == [
        0,
        1,
        2,
        3,
    ]  # the head start: all by the first weights
    assert set(fifo[lead:]) == {lead - 1, lead, lead + 1}
    assert 0 < sum(newest) / steps < 1
    for folder in ("fifo", "newest"):
        waiting = read_metrics(tmp_path / folder)["rollout/buffered"].tolist()
        batches = read_completions(tmp_path / folder).groupby("step").size() // 8
        assert set(waiting) == {lead - 1, lead, lead + 1} and sum(batches) == steps + waiting[-1]
        assert batches[1] == lead + 1 and set(batches[1:]) == {1, 2}
    early = read_completions(tmp_path / "fifo").query("step == 1")["prompt"].to_numpy().reshape(-1, 8)
    assert len({frozenset(batch) for batch in early}) == lead + 1  # other prompts each time
    sampled = set(read_completions(tmp_path / "newest")["step"] - 1)
    assert [age == 0 for age in newest] == [step in sampled for step in range(steps)]


def test_a_row_of_metrics_is_about_the_batch_trained_on(tmp_path):
    trainer = make(tmp_path, max_steps=8, kit={"buffer": "fifo", "lead": 2})
    trainer.train()
    table, rows = read_metrics(tmp_path), read_completions(tmp_path)
    batches = rows["reward"].to_numpy().reshape(-1, 8).mean(1)  # first in, first out
    assert table["reward"].to_numpy() == pytest.approx(batches[:8], abs=1e-6)
    assert not table["num_tokens"].isna().any() and table["num_tokens"].is_monotonic_increasing


def test_drift_of_old_rollouts_is_no_warning_and_the_options_are_on_record(tmp_path, capsys):
    """Without importance weights the gap to the sampler is the policy's own way since then."""
    make(tmp_path, max_steps=4, learning_rate=0.1, kit={"sync_every": 4, "importance_weights": False}).train()
    assert read_metrics(tmp_path)["rollout/logprob_gap"].max() > 0.05
    assert "sampler and trainer differ" not in capsys.readouterr().out
    config = json.loads((tmp_path / "run.json").read_text())["trainer"]
    assert config["class"] == "OffPolicyTrainer" and config["sync_every"] == 4
    assert config["importance_weights"] is False


def test_evaluation_samples_from_the_policy(tmp_path):
    trainer = make(
        tmp_path, kit={"sync_every": 4}, eval_strategy="steps", eval_steps=2, eval_dataset=data(2),
        per_device_eval_batch_size=4,
    )  # fmt: skip
    watch = Watch(trainer)
    inner = trainer.evaluate

    def evaluate(*args, **kwargs):
        seen = len(watch.sampled_by)
        result = inner(*args, **kwargs)
        assert len(watch.sampled_by) > seen
        assert all(same(sampler, clone(trainer)) for _, sampler in watch.sampled_by[seen:])
        return result

    trainer.evaluate = evaluate
    trainer.train()


@pytest.mark.parametrize("where", ["inside", "on the way out"])
def test_an_interrupt_while_the_sampler_has_its_weights_leaves_the_policy_its_own(where, tmp_path):
    trainer = make(tmp_path, kit={"sync_every": 4})
    watch = Watch(trainer)
    inner, begin, pressed = trainer.sampling.with_engine, trainer.session.guard.begin_finish_first, []

    def late():  # after the sampler is done, before anything waits
        if trainer.state.global_step == 2 and not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        begin()

    def generate(prompt_ids):
        if trainer.state.global_step == 2:
            assert same(clone(trainer), watch.policy[0])
            if where == "inside":
                press_stop()
            trainer.session.guard.begin_finish_first = late
        return inner(prompt_ids)

    trainer.sampling.with_engine = generate
    trainer.train(on_stop="return")
    assert trainer.interrupted and trainer.state.global_step == 2 and bool(pressed) == (where != "inside")
    assert same(clone(trainer), watch.policy[2]) and not same(watch.policy[0], watch.policy[2])
    assert trainer.optimizer.param_groups[0]["params"][0] in set(trainer.model.parameters())


@pytest.mark.parametrize(
    ("where", "options"), list(zip(["rollout", "backward", "optimizer"], BUFFERS, strict=True)), ids=str
)
def test_stopped_and_gone_on_is_as_if_never_stopped(where, options, tmp_path):
    untouched = make(tmp_path / "a", kit=options, max_steps=6)
    untouched.train()
    trainer = make(tmp_path / "b", kit=options, max_steps=6)
    sampled = read_completions(tmp_path / "a")["step"] - 1  # where a buffer is full, a step samples nothing
    interrupted_once(trainer, where, at_step=min(s for s in sampled if s >= 4))
    trainer.train(on_stop="return")
    assert trainer.interrupted
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 6 and same(weights(untouched), weights(trainer))
    assert ages(tmp_path / "a") == ages(tmp_path / "b")


@pytest.mark.parametrize("options", BUFFERS, ids=str)
def test_resumed_in_a_new_process_it_ends_where_the_first_one_did(options, tmp_path):
    first = make(tmp_path, kit=options, max_steps=7, save_strategy="steps", save_steps=5)
    first.train()
    wanted = weights(first)
    second = make(tmp_path, kit=options, max_steps=7)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert same(wanted, weights(second))


def test_resuming_what_it_did_not_write_is_refused(tmp_path):
    tiny_run.make("kit", tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match=r"off_policy\.pt"):
        make(tmp_path, kit={"sync_every": 4}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    make(tmp_path / "b", kit={"sync_every": 4}, max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match="sync_every was 4 and is 2"):
        make(tmp_path / "b", kit={"sync_every": 2}).train(
            resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2")
        )


@pytest.mark.parametrize(
    ("kit", "overrides", "words"),
    [
        ({"sync_every": 0}, {}, "sync_every=0"),
        ({"sync_every": 2.5}, {}, "sync_every=2.5"),
        ({"buffer": "lifo", "lead": 1}, {}, "'newest'"),
        ({"buffer": "fifo"}, {}, "lead=0"),
        ({"lead": 2}, {}, "buffer=None"),
        ({"rollout": "hf"}, {}, "rollout='hf'"),
        ({}, {"num_iterations": 2}, "num_iterations=2"),
        ({}, {"steps_per_generation": 2}, "steps_per_generation=2"),
        ({"buffer": "fifo", "lead": 1}, {"dataset": "iterable"}, "IterableDataset"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(kit, overrides, words, tmp_path):
    if overrides.get("dataset") == "iterable":
        overrides = {"dataset": IterableDataset.from_generator(lambda: iter(data().to_list()))}
    with pytest.raises(ValueError, match=words):
        make(tmp_path, kit=kit, **overrides)


def test_a_run_the_engine_declines_is_refused(tmp_path):
    trainer = make(tmp_path, kit={"sync_every": 2})
    trainer.generation_config.num_beams = 2
    with pytest.raises(ValueError, match="only it can sample with older weights"):
        trainer.train()
