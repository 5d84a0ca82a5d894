"""The last line of every public script, trainer.save_model(args.output_dir): the run stays readable, and goes on."""

import json
import shutil

import pytest
from tiny_run import make, same, weights

import grpo_kit as kit
from grpo_kit.__main__ import main
from grpo_kit.models import PolicyLoadError, load_policy
from grpo_kit.record.files import RunFolderError, read_metrics, run_file, run_settings

SAVES = dict(save_strategy="steps", save_steps=2)


@pytest.fixture(scope="module", params=["full", "lora"])
def saved(request, tmp_path_factory):
    """A run of four steps, its settings, and the weights after six; the model was saved into its folder."""
    folder, tuning = tmp_path_factory.mktemp("saved") / "run", request.param
    trainer = make("kit", folder, tuning=tuning, **SAVES)
    trainer.train()
    settings = json.loads((folder / "run.json").read_text())
    assert not (folder / "config.json").exists()
    trainer.save_model(trainer.args.output_dir)
    assert (folder / ("config.json" if tuning == "full" else "adapter_config.json")).is_file()
    longer = make("kit", folder.parent / "longer", tuning=tuning, max_steps=6)
    longer.train()
    return folder, tuning, settings, weights(longer)


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def test_card_evaluate_export_and_watch_read_it(run, saved, tmp_path, capsys, monkeypatch):
    _, tuning, settings, _ = saved
    assert run_settings(run) == settings and settings["model"]
    assert "Trained with GRPO by grpo_kit" in kit.model_card(run).read_text()
    model, tokenizer = load_policy(run, tuning=tuning, quiet=True)
    made = kit.export(model, tokenizer, tmp_path / "export", proof=False)
    assert settings["model"] in (made.folder / "README.md").read_text()
    monkeypatch.delenv("KIT_PROFILE", raising=False)
    assert main(["evaluate", str(run)]) == 2
    assert "give --task" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--task", "largest", "--profile", "smoke"]) == 0
    assert "half trained" not in capsys.readouterr().out
    assert main(["watch", str(run), "--last", "1"]) == 0
    for name in ("", "adapter_"):
        (run / f"{name}model.safetensors").unlink(missing_ok=True)
    assert main(["evaluate", str(run), "--task", "largest", "--profile", "smoke"]) == 0
    assert "half trained" in capsys.readouterr().out


def test_it_goes_on_to_the_weights_of_a_run_never_stopped(run, saved):
    again = make("kit", run, tuning=saved[1], max_steps=6, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6 and same(saved[3], weights(again))
    assert json.loads((run / "run.json").read_text()) == saved[2]
    assert read_metrics(run)["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_run_from_before_is_read_and_gets_its_own_name_where_it_goes_on(run, saved):
    (run / "run.json").replace(run / "config.json")
    assert run_file(run).name == "config.json" and run_settings(run) == saved[2]
    assert "Trained with GRPO by grpo_kit" in kit.model_card(run).read_text()
    again = make("kit", run, tuning=saved[1], max_steps=6, **SAVES)
    again.train(resume_from_checkpoint=True)
    again.save_model(again.args.output_dir)
    assert run_settings(run) == saved[2] and same(saved[3], weights(again))


def test_a_run_from_before_whose_settings_are_lost_says_so_and_goes_on(run, saved):
    (run / "run.json").unlink()
    (run / "config.json").write_text('{"architectures": ["Tiny"], "model_type": "tiny"}')
    assert run_settings(run) is None
    with pytest.raises(RunFolderError, match="holds no run"):
        kit.model_card(run)
    again = make("kit", run, tuning=saved[1], max_steps=6, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert same(saved[3], weights(again)) and run_settings(run)["model"] == saved[2]["model"]


def test_a_run_folder_without_a_model_is_no_policy(run):
    for path in [*run.glob("*.safetensors"), *run.glob("*config.json")]:
        path.unlink()
    with pytest.raises(PolicyLoadError, match="is the folder of a run"):
        load_policy(run, quiet=True)
