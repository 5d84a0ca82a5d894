"""A tweak is obeyed or refused: before, between and while training, and again when a run is resumed."""

import json
import random
import threading

import pytest
import torch
from tiny_run import data, interrupted_once, letters, make, press_stop, same, weights
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from grpo_kit import schedules
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.record.control import control, read_changes
from grpo_kit.record.files import RunFolderError, read_metrics

AT = 3  # steps done when the change is asked for
STEPS = 6


def vowels(completions, **columns):
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


COMMON = dict(max_steps=STEPS, rewards=[letters, vowels], beta=0.05, lr_scheduler_type="linear")


class OnStepBegin(TrainerCallback):
    """An independent way to change a number at a step: where trl and transformers read it."""

    def __init__(self, do):
        self.do = do

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == AT:
            self.do(args)


def reference(name, folder):
    """A run that has the change from the step after AT on, made without trainer.change."""
    if name == "temperature":
        cut = AT / (STEPS - 1)
        return make("kit", folder, kit={"temperature": schedules.stepwise([1.0, 0.6], at=[cut])}, **COMMON)
    if name == "schedule":
        rising = schedules.linear(1.0, 2.0)
        held = lambda p: 1.0 if p < AT / (STEPS - 1) else rising(p)  # noqa: E731
        return make("kit", folder, kit={"temperature": held}, **COMMON)
    if name == "learning_rate":  # linear from the height to 0, another height from AT on
        trainer = make("kit", folder, **COMMON)
        rate = lambda step: (1.0 if step < AT else 0.25) * (1 - step / STEPS)  # noqa: E731
        inner = trainer.create_scheduler

        def create_scheduler(num_training_steps, optimizer=None):
            if trainer.lr_scheduler is None:
                trainer.lr_scheduler = LambdaLR(trainer.optimizer, rate)
                trainer._created_lr_scheduler = True
            return inner(num_training_steps)

        trainer.create_scheduler = create_scheduler
        return trainer
    trainer = make("kit", folder, **COMMON)
    trainer.changes.take_over_assigned = lambda running: None  # trl reads what is assigned here
    do = {
        "beta": lambda args: setattr(trainer, "beta", 0.5),
        "epsilon_high": lambda args: setattr(trainer, "epsilon_high", 0.001),
        "max_grad_norm": lambda args: setattr(args, "max_grad_norm", 0.01),
        "reward_weights": lambda args: setattr(trainer, "reward_weights", torch.tensor([0.0, 1.0])),
    }[name]
    trainer.add_callback(OnStepBegin(do))
    return trainer


TWEAKS = {
    "learning_rate": {"learning_rate": 0.0025},
    "temperature": {"temperature": 0.6},
    "schedule": {"temperature": schedules.linear(1.0, 2.0)},
    "beta": {"beta": 0.5},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "reward_weights": {"reward_weights": [0.0, 1.0]},
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    trainer = make("kit", tmp_path_factory.mktemp("untouched") / "run", **COMMON)
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize("name", TWEAKS)
def test_between_stop_and_go_while_it_runs_and_resumed_are_one_run(name, tmp_path, untouched):
    """Bit for bit, and equal to a run that was made with the change from that step on."""
    wanted = reference(name, tmp_path / "wanted")
    wanted.train()
    assert not same(untouched, weights(wanted)), "the change changes something"

    between = make("kit", tmp_path / "between", **COMMON)
    interrupted_once(between, "backward", at_step=AT)
    between.train(on_stop="return")
    between.change(**TWEAKS[name])
    between.train()
    assert same(weights(wanted), weights(between))

    during = make("kit", tmp_path / "during", save_strategy="steps", save_steps=2, **COMMON)
    during.add_callback(OnStepEnd(AT, lambda: during.change(**TWEAKS[name])))
    during.train()
    assert same(weights(wanted), weights(during))
    (line,) = read_changes(tmp_path / "during")
    assert line["step"] == AT + 1 and list(line["change"]) == list(TWEAKS[name])
    assert line | {"by": ""} == read_changes(tmp_path / "between")[0] | {"by": ""}

    resumed = make("kit", tmp_path / "during", save_strategy="steps", save_steps=2, **COMMON)
    resumed.train(resume_from_checkpoint=str(tmp_path / "during/checkpoint-2"))  # before the change
    assert same(weights(wanted), weights(resumed))
    assert read_changes(tmp_path / "during") == [line], "made again, not asked again"


class OnStepEnd(TrainerCallback):
    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.do()


def test_a_change_waits_for_the_next_rollout_buffer(tmp_path):
    trainer = make("kit", tmp_path, num_iterations=2, max_steps=6)
    trainer.add_callback(OnStepEnd(1, lambda: trainer.change(temperature=0.5, learning_rate=1e-3)))
    trainer.train()
    table = read_metrics(tmp_path)
    assert table["learning_rate"].tolist() == [1e-2, 1e-2, 1e-3, 1e-3, 1e-3, 1e-3]
    assert table["temperature"].dropna().tolist() == [1.0, 0.5, 0.5]
    assert {line["step"] for line in read_changes(tmp_path)} == {3}


@pytest.mark.parametrize("in_memory", [True, False], ids=["same trainer", "new process"])
@pytest.mark.parametrize("stop", [None, 3], ids=["never stopped", "stopped before"])
def test_a_run_that_is_done_goes_on_and_never_back(stop, in_memory, tmp_path):
    common = dict(tuning="lora", lr_scheduler_type="constant", lora={"lora_dropout": 0.2}, num_iterations=2)
    whole = make("kit", tmp_path / "whole", max_steps=8, **common)
    whole.train()
    saves = {} if in_memory else {"save_strategy": "steps", "save_steps": 5}
    trainer = make("kit", tmp_path / "run", max_steps=5, **common, **saves)
    if stop:
        interrupted_once(trainer, "backward", at_step=stop)
        trainer.train(on_stop="return")
    trainer.train()
    assert trainer.state.global_step == 5
    trainer.train()  # once more: nothing is left to do, and nothing happens
    assert trainer.state.global_step == 5 and read_changes(tmp_path / "run") == []
    if in_memory:
        assert not list((tmp_path / "run").glob("checkpoint-*")), "those of stops go when the run is done"
        trainer.change(max_steps=8)
        trainer.train()
    else:
        trainer = make("kit", tmp_path / "run", max_steps=8, **common, **saves)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8 and same(weights(whole), weights(trainer))
    assert read_metrics(tmp_path / "run")["step"].tolist() == list(range(1, 9))
    assert not (tmp_path / "run/redone").exists()
    assert [line["change"] for line in read_changes(tmp_path / "run")] == [{"max_steps": 8}]
    seconds = read_metrics(tmp_path / "run")["seconds"]
    assert (seconds.diff().dropna() > 0).all(), "the time before the stop counts"


def test_more_steps_are_asked_for_in_the_last_one(tmp_path):
    whole = make("kit", tmp_path / "whole", max_steps=6)
    whole.train()
    trainer = make("kit", tmp_path / "run", max_steps=4)
    trainer.add_callback(OnStepEnd(4, lambda: trainer.change(max_steps=6)))
    trainer.train()
    assert trainer.state.global_step == 6 and same(weights(whole), weights(trainer))


def test_a_longer_run_follows_its_schedules_from_there_on(tmp_path):
    trainer = make(
        "kit",
        tmp_path,
        max_steps=4,
        lr_scheduler_type="linear",
        kit={"temperature": schedules.linear(1.0, 0.5)},
    )
    trainer.add_callback(OnStepEnd(2, lambda: trainer.change(max_steps=8)))
    trainer.train()
    table = read_metrics(tmp_path)
    assert table["learning_rate"].tolist() == pytest.approx(
        [1e-2, 0.75e-2] + [1e-2 * (1 - step / 8) for step in range(2, 8)]
    )
    assert table["temperature"].tolist() == pytest.approx(
        [1.0, 1 - 0.5 / 3] + [1 - 0.5 * step / 7 for step in range(2, 8)]
    )


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("learning_rate", -1e-5, "above 0"),
        ("learning_rate", "fast", "above 0"),
        ("temperature", 0, "above 0"),
        ("temperature", schedules.linear(1.0, 0.0), "goes down to 0"),
        ("temperature", "linear(1, 'a')", "cannot be read"),
        ("max_steps", 2, "done already"),
        ("beta", 0.1, "no reference model"),
        ("reward_weights", [1.0, 2.0], "there are 1 rewards"),
        ("eval_steps", 2, "nothing to evaluate on"),
        ("num_generations", 8, "cannot be changed"),
        ("max_completion_length", 12, "cannot be changed"),
        ("bogus", 1, "cannot be changed"),
    ],
)
def test_refused_by_name(name, value, error, tmp_path, refused):
    with pytest.raises(ValueError, match=error) as caught:
        refused.change(**{name: value})
    assert name in str(caught.value)
    with pytest.raises(ValueError, match="no change"):
        refused.change()


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    trainer = make("kit", tmp_path_factory.mktemp("refused") / "run", max_steps=3)
    trainer.train()
    return trainer


def test_what_is_assigned_between_stop_and_go_is_obeyed_or_refused(tmp_path):
    trainer = make("kit", tmp_path, max_steps=5, kit={"temperature": schedules.linear(1.0, 0.5)})
    trainer.add_callback(OnStepEnd(2, press_stop))
    trainer.train(on_stop="return")
    trainer.args.learning_rate = 1e-3
    trainer.args.max_steps = 4
    trainer.temperature = 0.7
    trainer.train()
    table = read_metrics(tmp_path)
    assert table["learning_rate"].tolist() == [1e-2, 1e-2, 1e-3, 1e-3]
    assert table["temperature"].tolist()[2:] == [0.7, 0.7]
    assert {line["by"] for line in read_changes(tmp_path)} == {"assigned"}
    for owner, name, value in [
        (trainer.args, "num_generations", 2),
        (trainer.args, "weight_decay", 0.3),
        (trainer, "train_dataset", data(4)),
        (trainer, "num_iterations", 2),
    ]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(ValueError, match=f"{name} was changed"):
            trainer.train()
        assert getattr(owner, name) is before or getattr(owner, name) == before, "it is back"


def test_what_is_assigned_while_it_runs_is_obeyed_or_put_back(tmp_path, capsys):
    trainer = make("kit", tmp_path, max_steps=4)

    def assign():
        trainer.args.learning_rate = 1e-3
        trainer.num_generations = 2

    trainer.add_callback(OnStepEnd(2, assign))
    trainer.train()
    assert read_metrics(tmp_path)["learning_rate"].tolist() == [1e-2, 1e-2, 1e-3, 1e-3]
    assert trainer.num_generations == 4 and "trainer.num_generations was changed" in capsys.readouterr().out


def test_a_new_process_with_other_numbers_is_obeyed_and_written_down(tmp_path):
    saves = dict(save_strategy="steps", save_steps=2)
    make("kit", tmp_path, max_steps=4, **saves).train()
    other = make("kit", tmp_path, max_steps=6, learning_rate=1e-3, **saves)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert read_metrics(tmp_path)["learning_rate"].tolist() == [1e-2] * 2 + [1e-3] * 4
    assert [(line["step"], line["by"]) for line in read_changes(tmp_path)] == [(3, "made so")]


def test_a_later_change_gives_way_to_a_new_one_and_is_kept_aside(tmp_path):
    trainer = make("kit", tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    trainer.add_callback(OnStepEnd(2, lambda: trainer.change(learning_rate=1e-3, temperature=0.5)))
    trainer.train()
    again = make("kit", tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    again.change(learning_rate=2e-3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    table = read_metrics(tmp_path)
    assert table["learning_rate"].tolist() == [1e-2, 2e-3, 2e-3, 2e-3]
    assert table["temperature"].tolist() == [1.0, 1.0, 0.5, 0.5], "the other is made again"
    kept = [json.loads(line) for line in (tmp_path / "redone/changes.jsonl").read_text().splitlines()]
    assert kept[0]["change"]["learning_rate"] == 1e-3


def test_a_function_that_no_file_holds_is_asked_for_again(tmp_path):
    def falling(progress):
        return 1.0 - 0.5 * progress

    trainer = make("kit", tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    trainer.add_callback(OnStepEnd(1, lambda: trainer.change(temperature=falling)))
    trainer.train()
    again = make("kit", tmp_path, max_steps=4, save_strategy="steps", save_steps=1)
    with pytest.raises(ValueError, match=r"falling.*trainer.change\(temperature=...\)"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again.change(temperature=falling)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(trainer), weights(again))


# ---- by the control folder -------------------------------------------------------------------------------------


def test_saving_is_turned_on_by_a_number_even_by_the_one_that_is_there(tmp_path):
    trainer = make("kit", tmp_path, max_steps=4, save_steps=2)  # save_strategy="no"
    trainer.add_callback(OnStepEnd(1, lambda: trainer.change(save_steps=2)))
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    (line,) = read_changes(tmp_path)
    assert line["change"] == {"save_steps": 2} and line["was"] == {"save_steps": None}
    again = make("kit", tmp_path, max_steps=6)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "checkpoint-6").is_dir(), "restored on resume"


def test_another_process_changes_saves_pauses_and_stops(tmp_path):
    """The requests are files: nothing but the folder is shared."""
    trainer = make("kit", tmp_path / "run", max_steps=40)
    seen = []

    def steer():
        hand = control(tmp_path / "run")
        wait_for(lambda: trainer.state.global_step >= 2)
        hand.change(learning_rate=1e-3)
        (tmp_path / "run/control/by-hand.json").write_text('{"change": {"beta": 0.1}}')
        (tmp_path / "run/control/half.json").write_text('{"do": ')  # still being written
        hand.save()
        wait_for(lambda: list((tmp_path / "run").glob("checkpoint-*")))
        hand.pause()
        wait_for(lambda: trainer.requests._paused)
        paused_at = trainer.state.global_step
        threading.Event().wait(0.5)
        seen.append(trainer.state.global_step == paused_at)
        hand.go_on()
        wait_for(lambda: trainer.state.global_step >= paused_at + 2)
        hand.stop()

    def wait_for(done):
        for _ in range(1200):
            if done():
                return
            threading.Event().wait(0.05)
        raise AssertionError("waited in vain")

    thread = threading.Thread(
        target=lambda: (wait_for(lambda: (tmp_path / "run/run.json").exists()), steer())
    )
    thread.start()
    with pytest.raises(Stopped) as caught:
        trainer.train()
    thread.join()
    assert seen == [True] and caught.value.step == trainer.state.global_step < 40
    made, refused = sorted(read_changes(tmp_path / "run"), key=lambda line: "refused" in line)
    assert made["change"] == {"learning_rate": 1e-3} and made["by"] == "control"
    assert refused["refused"] == {"beta": 0.1} and "no reference model" in refused["why"]
    table = read_metrics(tmp_path / "run")
    assert (table["learning_rate"] == 1e-3).tolist() == (table["step"] >= made["step"]).tolist()
    (tmp_path / "run/control/half.json").unlink()
    trainer.change(max_steps=trainer.state.global_step + 1)
    trainer.train()
    assert not (tmp_path / "run/control").exists()


def test_requests_of_an_earlier_run_do_not_stop_the_next_one(tmp_path):
    trainer = make("kit", tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    hand = control(tmp_path)
    hand.stop()
    hand.change(max_steps=5)
    make("kit", tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert read_metrics(tmp_path)["step"].max() == 5


def test_a_run_that_is_done_hears_what_was_asked_of_its_folder(tmp_path):
    trainer = make("kit", tmp_path, max_steps=2)
    trainer.train()
    hand = control(tmp_path)
    hand.pause()
    (tmp_path / "control/a-number.json").write_text("7")
    hand.change(max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3 and not (tmp_path / "control").exists()


def test_a_damaged_line_of_changes_is_left_out(tmp_path):
    trainer = make("kit", tmp_path, max_steps=2)
    trainer.change(learning_rate=1e-3)
    trainer.train()
    with open(tmp_path / "changes.jsonl", "ab") as file:
        file.write(b"\x00\x00\n{half")
    with pytest.warns(RuntimeWarning, match="line 2 cannot be read"):
        (line,) = read_changes(tmp_path)
    assert line["step"] == 1 and line["was"] == {"learning_rate": 1e-2}


def test_control_refuses_at_once(tmp_path):
    with pytest.raises(RunFolderError, match="holds no run"):
        control(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    hand = control(tmp_path)
    with pytest.raises(ValueError, match="learning_rate"):
        hand.change(learning_rate=0)
    with pytest.raises(ValueError, match="schedule"):
        hand.change(temperature=lambda progress: 1.0)
    assert not (tmp_path / "control").exists()


@pytest.mark.parametrize("seed", range(3))
def test_changes_stops_and_kills_at_random_moments_end_where_one_run_does(seed, tmp_path):
    """The plan is drawn; the reference has the same changes at the steps that the record names, and no stop."""
    draw = random.Random(seed)
    options = dict(max_steps=8, num_iterations=draw.choice([1, 2]), save_strategy="steps", save_steps=1)
    asked = {draw.randrange(1, 7): {"learning_rate": draw.choice([2e-3, 5e-3])} for _ in range(2)}
    asked[draw.randrange(1, 7)] = {"temperature": draw.choice([0.5, 1.5])}
    trainer = make("kit", tmp_path / "run", **options)
    stops = sorted(draw.sample(range(1, 8), 2))
    for part in range(8):
        for step, values in asked.items():
            if trainer.state.global_step < step:
                trainer.add_callback(
                    OnStepEnd(step, lambda values=values, trainer=trainer: trainer.change(**values))
                )
        if stops:
            interrupted_once(trainer, draw.choice(["rollout", "backward"]), at_step=stops.pop(0))
        new = draw.random() < 0.5 and part
        if new:
            trainer = make("kit", tmp_path / "run", **options)
        trainer.train(resume_from_checkpoint=bool(new) or None, on_stop="return")
        if not trainer.interrupted:
            break
    assert trainer.state.global_step == 8
    whole = make("kit", tmp_path / "whole", **options)
    for line in read_changes(tmp_path / "run"):
        whole.add_callback(OnStepEnd(line["step"] - 1, lambda line=line: whole.change(**line["change"])))
    whole.train()
    assert same(weights(whole), weights(trainer))
