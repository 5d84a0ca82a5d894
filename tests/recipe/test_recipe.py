"""A recipe: what it names is what is trained, and how; a folder keeps it, and its run goes on from any stop."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipe_file import written
from safetensors.torch import load_file

import grpo_kit as kit
from grpo_kit.hooks.watch_run import StoppedByFlag
from grpo_kit.loop.hooks import Hook
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.models import load_policy
from grpo_kit.recipe import Recipe, remembered, run_recipe
from grpo_kit.record.files import RunFolderError, read_metrics


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in another order end in other weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A recipe of a file, run to its end."""
    folder = tmp_path_factory.mktemp("ran")
    file = written(folder)
    return folder, file, Recipe.of(file).run(folder / "runs" / "one", live=None)


# ---- what it names --------------------------------------------------------------------------------------------------


def test_its_numbers_are_the_profiles_with_its_own():
    recipe = Recipe(profile="smoke", steps=5, seed=3, learning_rate=0.5, tuning="lora", temperature=0.9)
    cfg = recipe.cfg
    assert (cfg.steps, cfg.seed, cfg.learning_rate, cfg.temperature) == (5, 3, 0.5, 0.9)
    assert cfg == kit.preset("smoke", tuning="lora", steps=5, seed=3, learning_rate=0.5, temperature=0.9)
    config = recipe.make_config()
    assert (config.steps, config.learning_rate, config.temperature, config.seed) == (5, 0.5, 0.9, 3)
    assert config.optimizer is None, "adapters take what their weights need"
    other = Recipe("countdown", profile=kit.preset("smoke", group_size=2))
    assert other.cfg.group_size == 2 and other.make_task().name == "countdown"
    cooling = Recipe(profile="smoke", temperature="cosine(1.2, 0.8)", optimizer="adamw-8bit-split")
    assert cooling.schedule == cooling.make_config().temperature == kit.cosine(1.2, 0.8)
    assert cooling.make_config().optimizer == "adamw-8bit-split"
    assert Recipe(profile="smoke").make_config().optimizer == "adamw"
    assert Recipe(profile="smoke", config={"iterations": 3, "loss": "grpo"}).make_config().iterations == 3


@pytest.mark.parametrize("of_the_kit", [True, False])
def test_a_folder_from_before_the_length_was_the_tasks_opens(tmp_path, of_the_kit):
    """Profiles held a length then, also where nobody had asked for one: `follows` in recipe.json marks it."""
    (tmp_path / "mine.py").write_text(
        "import grpo_kit as kit\ntask = kit.tasks.largest(n_train=32, n_held_out=8, max_completion_tokens=16)\n"
    )
    given = (
        {"profile": kit.preset("smoke", held_out=8)} if of_the_kit else {"task": str(tmp_path / "mine.py")}
    )
    remembered.write(Recipe(**{"profile": "smoke", **given}), tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    kept = json.loads(path.read_text())
    kept["numbers"] |= {"max_completion_tokens": 8, "task_options": {"n_train": 32}}
    path.write_text(json.dumps(kept | {"follows": ["largest", 12, 8]}))
    opened = Recipe.of(tmp_path / "run")
    remembered.check_same(tmp_path / "run", opened.make_task())
    assert opened.make_config().max_completion_tokens in (None, opened.make_task().max_completion_tokens)
    assert opened.make_task().max_completion_tokens == (8 if of_the_kit else 16)
    path.write_text(json.dumps(kept | {"follows": None}))  # a length that was asked for
    assert Recipe.of(tmp_path / "run").cfg.max_completion_tokens == 8


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"tuning": "half"}, "tuning='half'"),
        ({"lora": {"r": 4}}, "lora=.* no effect"),
        ({"steps": 0}, "steps=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": "hot"}, "schedule 'hot'"),
        ({"temperature": lambda progress: 1.0}, "schedule"),
        ({"held_out_every": 0}, "held_out_every=0"),
        ({"on_flag": print}, "on_flag"),
        ({"config": {"seed": 1}}, "config has seed=1, which the profile has"),
        ({"config": {"group_size": 4}}, r"group_size=4, .*profile=kit.preset\(name, group_size=...\)"),
        (
            {"config": {"num_iterations": 2}},
            "num_iterations=2: Config has no such field; did you mean 'iterations'",
        ),
        ({"config": {"iterations": 0}}, "iterations=0"),
        ({"optimizer": "rocket"}, "optimizer='rocket'"),
        (
            {"report_to": ["mlflow"]},
            "report_to='mlflow' is not known; use 'tensorboard', 'trackio' or 'wandb'",
        ),
        ({"keep": "first"}, "keep='first' is not known; use 'last' or 'best'"),
        (
            {"keep": "best", "held_out_every": None},
            "keep='best', but held_out_every=None .*such as held_out_every=8",
        ),
        ({"task": "smallest"}, "task='smallest' is not known"),
        ({"profile": "tpu"}, "preset 'tpu'"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(arguments, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**{"profile": "smoke", **arguments})


@pytest.mark.parametrize(
    "text, said",
    [
        ("x = 1\n", "defines neither `recipe` nor `task`"),
        ("task = [1]\n", "`task` in .* is a list"),
        ("import grpo_kit as kit\ntask = kit.nothing\n", r"bad.py, line 2: AttributeError: .*nothing"),
        ("def task():\n    return 1 / 0\n", r"bad.py, line 2: ZeroDivisionError"),
        ("task = (\n", r"bad.py, line 1: SyntaxError"),
        ("import grpo_kit as kit\nrecipe = kit.Recipe(profile='smoke')\nrecipe.run('x')\n", "__main__"),
    ],
)
def test_a_file_that_gives_no_recipe_says_why(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        Recipe.of(tmp_path / "bad.py")
    with pytest.raises(ValueError, match="is no file"):
        Recipe.of(tmp_path / "none.py")


# ---- the run --------------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_the_notebook_leaves(ran):
    _, _, outcome = ran
    folder = outcome.folder
    results = json.loads((folder / "results.json").read_text())
    assert results["steps"] == 4 and results["n"] == 4 and results["task"] == "words"
    assert results["before"]["accuracy"] == outcome.before.strict.value
    assert (
        results["after"][results["measure"]] == outcome.after.result.value and results["weights_of_step"] == 4
    )
    assert outcome.comparison.sentence in (folder / "README.md").read_text()
    assert not (folder / ".going").exists()
    base = load_policy("tiny-random", quiet=True)[0].state_dict()
    tuned = weights(folder)
    assert not all(torch.equal(base[name], tuned[name]) for name in tuned), "it has to learn something"
    loaded, tokenizer = load_policy(outcome.model, quiet=True)
    again = kit.evaluate(loaded, tokenizer, Recipe.of(folder).make_task())
    assert again.rows["completion"].tolist() == outcome.after.rows["completion"].tolist()


def test_it_equals_the_public_names_spelled_out(ran, tmp_path):
    """What the recipe does beside what a person writes by hand."""
    _, file, outcome = ran
    task = Recipe.of(file).make_task()
    cfg = kit.preset("smoke", steps=4, learning_rate=1e-2)
    torch.manual_seed(cfg.seed)
    model, tokenizer = kit.load_policy(cfg.model, dtype=cfg.dtype, quiet=True)
    trainer = kit.GRPOTrainer(
        model, task, kit.preset(cfg, temperature=kit.linear(1.2, 0.8)), tokenizer=tokenizer, folder=tmp_path / "run",
        live=None,
    )  # fmt: skip
    trainer.train()
    trained = trainer.model.state_dict()
    tuned = weights(outcome.folder)
    assert all(torch.equal(trained[name], tuned[name]) for name in tuned)


# ---- going on -------------------------------------------------------------------------------------------------------


class PressStop(Hook):
    """Stops a run after so many steps, as Ctrl-C does; at 0 inside the first one."""

    def __init__(self, at):
        self.at = at

    def before_step(self, trainer):
        if self.at == 0:
            os.kill(os.getpid(), 2)

    def after_step(self, trainer, row, batch):
        if trainer.step == self.at:
            os.kill(os.getpid(), 2)


def hooked(monkeypatch, hook):
    """From here on a recipe's trainer has the hook."""
    plain = Recipe.trainer

    def trainer(self, *args, **options):
        made = plain(self, *args, **options)
        made.hooks.append(hook)
        return made

    monkeypatch.setattr(Recipe, "trainer", trainer)


def stopped(monkeypatch, recipe, folder, at):
    with monkeypatch.context() as patched:
        hooked(patched, PressStop(at))
        with pytest.raises(Stopped):
            recipe.run(folder, live=None)


@pytest.mark.parametrize("stop_at", [0, 2])
def test_after_a_stop_it_goes_on_to_the_same_weights_without_being_told_anything(
    ran, tmp_path, monkeypatch, stop_at
):
    _, file, outcome = ran
    mine = written(tmp_path)
    stopped(monkeypatch, Recipe.of(mine), tmp_path / "run", stop_at)
    assert read_metrics(tmp_path / "run")["step"].max() == stop_at and not (tmp_path / "run/model").exists()
    mine.unlink()  # the run has its own copy
    found = Recipe.of(tmp_path / "run").run(tmp_path / "run", resume=True, live=None)
    assert same(weights(found.folder), weights(outcome.folder))
    assert read_metrics(found.folder)["step"].tolist() == [0, 1, 2, 3, 4]
    assert found.comparison.sentence == outcome.comparison.sentence
    done = Recipe.of(found.folder).run(found.folder, resume=True, live=None)  # a run that is done is done
    assert done.comparison.sentence == outcome.comparison.sentence


def test_a_stop_after_the_training_is_made_up_too_and_one_before_it_leaves_nothing(tmp_path, monkeypatch):
    mine = written(tmp_path)
    calls, plain = [], run_recipe.evaluate

    def interrupted(at):
        def evaluate(*args, **options):
            calls.append(at)
            if len(calls) == at:
                raise KeyboardInterrupt
            return plain(*args, **options)

        monkeypatch.setattr(run_recipe, "evaluate", evaluate)

    interrupted(1)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Recipe.of(mine).run(folder, live=None)
    assert not folder.exists(), "nothing was done, and the name is free"
    calls.clear()
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        Recipe.of(mine).run(folder, live=None)
    trained = weights(folder)
    assert not (folder / "after.json").exists()
    found = Recipe.of(folder).run(folder, resume=True, live=None)
    assert same(weights(folder), trained) and found.after is not None and (folder / "results.json").is_file()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tuning": "lora"}, "tuning='lora'"),
        ({"seed": 5}, "seed=5"),
        ({"model": "smollm2-135m-instruct"}, "model="),
        ({"steps": 9}, "ended with step 4 and kept no checkpoint"),
    ],
)
def test_a_run_does_not_go_on_as_another(ran, change, said):
    _, _, outcome = ran
    with pytest.raises(RunFolderError, match=said):
        Recipe.of(outcome.folder, **change).run(outcome.folder, resume=True, live=None)


def test_another_task_is_refused_and_a_second_run_too(ran, tmp_path):
    folder, file, outcome = ran
    other = written(tmp_path, recipe=False)
    other.write_text(other.read_text().replace("Speak.", "Speak up."))
    with pytest.raises(RunFolderError, match="is not what .* was begun with"):
        Recipe.of(outcome.folder, task=str(other)).run(outcome.folder, resume=True, live=None)
    copy = outcome.folder / "recipe.py"
    text = copy.read_text()
    copy.write_text(text.replace("Speak.", "Shout."))
    try:
        with pytest.raises(RunFolderError, match="is not what"):
            Recipe.of(outcome.folder).run(outcome.folder, resume=True, live=None)
    finally:
        copy.write_text(text)
    with pytest.raises(RunFolderError, match="one-2"):
        Recipe.of(file).run(outcome.folder, live=None)
    with pytest.raises(RunFolderError, match="holds no run"):
        Recipe.of(tmp_path)


def test_a_task_in_memory_has_to_be_given_again(tmp_path):
    task = kit.tasks.largest(n_train=16, n_held_out=4)
    folder = tmp_path / "run"
    Recipe(task, profile="smoke", steps=1, held_out_every=None).run(folder, live=None)
    with pytest.raises(ValueError, match="'largest' of .* lived in memory alone"):
        Recipe.of(folder)
    given = Recipe.of(folder, task=kit.tasks.largest(n_train=16, n_held_out=4))
    remembered.check_same(folder, given.make_task())
    with pytest.raises(RunFolderError):
        remembered.check_same(folder, kit.tasks.largest(n_train=17, n_held_out=4))


def test_a_longer_run_goes_on_from_a_checkpoint_and_keeps_the_shorter_ones_model(tmp_path):
    folder = tmp_path / "run"
    recipe = Recipe(profile=kit.preset("smoke", save_steps=1))
    recipe.run(folder, live=None)
    shorter = weights(folder)
    Recipe.of(folder, steps=3).run(folder, resume=True, live=None)
    assert read_metrics(folder)["step"].max() == 3 and Recipe.of(folder).cfg.steps == 3
    assert same(load_file(folder / "model-2" / "model.safetensors"), shorter)
    assert (folder / "results-2.json").is_file()


def test_a_run_that_cannot_begin_leaves_its_name_free(tmp_path):
    file = written(tmp_path, recipe=False)
    file.write_text(file.read_text().replace('"answer": str(n)', '"answer": ""'))
    recipe = Recipe(str(file), profile="smoke", model="./nowhere")
    with pytest.raises(ValueError, match="no such folder"):
        recipe.run(tmp_path / "run", live=None)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_cannot_take_the_model_is_met_before_it_is_trained(tmp_path, monkeypatch):
    """Met at the end it would cost the weights."""
    recipe, free = Recipe.of(written(tmp_path), steps=1), shutil.disk_usage(tmp_path)
    needed = sum(p.numel() for p in kit.load_policy("tiny-random", quiet=True)[0].parameters()) * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=needed - 1))
    with pytest.raises(RunFolderError, match="make room, or give a folder on another disk"):
        recipe.run(tmp_path / "run", live=None)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=needed))
    assert recipe.run(tmp_path / "run", live=None).model.is_dir()


def test_one_process_at_a_time_trains_into_a_folder(ran):
    from grpo_kit.record.run_lock import GOING, is_locked

    _, _, outcome = ran
    code = "import pathlib, sys; from grpo_kit.record.run_lock import alone\n"
    code += "with alone(pathlib.Path(sys.argv[1])): print('has it', flush=True), sys.stdin.read()"
    command = [sys.executable, "-c", code, outcome.folder]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(kit.__file__).parents[1], **pipes) as other:
        other.stdout.readline()
        assert is_locked(outcome.folder)
        with pytest.raises(RunFolderError, match="another process"):
            Recipe.of(outcome.folder).run(outcome.folder, resume=True, live=None)
        other.communicate("")
    assert is_locked(outcome.folder) is None and not (outcome.folder / GOING).exists()
    (outcome.folder / GOING).touch()  # of a process that was killed
    assert is_locked(outcome.folder) is False
    (outcome.folder / GOING).unlink()


def test_lora_is_kept_and_found_again(tmp_path):
    folder = tmp_path / "run"
    recipe = Recipe(profile="smoke", steps=1, tuning="lora", lora={"r": 2}, held_out_every=None)
    outcome = recipe.run(folder, live=None)
    assert (folder / "model" / "adapter_config.json").is_file()
    assert Recipe.of(folder).lora == {"r": 2} and outcome.comparison


# ---- what ends it, and what it ends with ----------------------------------------------------------------------------


def test_a_red_flag_ends_it_without_a_model_and_it_goes_on(tmp_path):
    """Every completion of the tiny model is cut off, which is a flag after some steps."""
    recipe = Recipe(profile="smoke", steps=6, on_flag="stop", held_out_every=None)
    with pytest.raises(StoppedByFlag, match=r"red flag: cut off.*saved to") as stop:
        recipe.run(tmp_path / "run", live=None)
    assert 0 < stop.value.step < 6 and not (tmp_path / "run/model").exists()
    Recipe.of(tmp_path / "run", on_flag="warn").run(tmp_path / "run", resume=True, live=None)
    assert read_metrics(tmp_path / "run")["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_the_best_evaluations_weights_are_the_model(tmp_path, monkeypatch):
    values = iter([0.1, 0.7, 0.4])
    at = {}

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            at[trainer.step] = {name: p.detach().clone() for name, p in trainer.trained.items()}

    monkeypatch.setattr(kit.HeldOut, "measure", lambda self, *given: {self.judged_by: next(values)})
    hooked(monkeypatch, Keep())
    recipe = Recipe.of(written(tmp_path), keep="best")
    folder = recipe.run(tmp_path / "run", live=None).folder
    tuned = weights(folder)
    assert all(torch.equal(tuned[name], at[2][name]) for name in tuned)
    assert not same(tuned, {name: at[4][name] for name in tuned})
    assert json.loads((folder / "results.json").read_text())["weights_of_step"] == 2


def test_another_sample_is_taken(tmp_path):
    from grpo_kit.loop.generate import generate

    calls = []

    def counted(*given):
        calls.append(1)
        return generate(*given)

    Recipe(profile="smoke", held_out_every=None).run(tmp_path / "run", live=None, sample=counted)
    assert len(calls) == 2


def test_a_tracker_is_a_hook_of_the_trainer(tmp_path):
    recipe = Recipe(profile="smoke", report_to="tensorboard")
    (tracker,) = recipe.trackers()
    assert type(tracker) in {type(hook) for hook in recipe.trainer(tmp_path / "run", live=None).hooks}
    assert Recipe(profile="smoke").trackers() == []


# ---- runs of before -------------------------------------------------------------------------------------------------


def test_a_recipe_of_trls_trainer_opens_and_names_what_it_is_read_without(tmp_path):
    folder = tmp_path / "run"
    remembered.write(Recipe(profile="smoke", steps=1), folder)
    path = folder / "recipe.json"
    kept = json.loads(path.read_text())
    kept |= {"made_by": None, "options": {"rollout": "hf"}, "report_to": "none"}
    kept["config"] = {"num_iterations": 2, "max_grad_norm": 0.5}
    path.write_text(json.dumps(kept))
    with pytest.warns(RuntimeWarning, match="'num_iterations': 2, 'rollout': 'hf'"):
        opened = Recipe.of(folder)
    assert opened.config == {"max_grad_norm": 0.5} and opened.cfg.steps == 1 and opened.trackers() == []
    (folder / "metrics.csv").write_text("step,reward\n1,0.5\n")
    with pytest.warns(RuntimeWarning), pytest.raises(RunFolderError, match="was trained by TRL's trainer"):
        Recipe.of(folder).run(folder, resume=True, live=None)
