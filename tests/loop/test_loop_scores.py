"""A reward is called in training as everywhere else."""

from dataclasses import replace

import pytest
from loop_runs import make, task

import grpo_kit as kit


@pytest.mark.parametrize("seams", ["plain", "fast"])
def test_training_gives_a_reward_the_arguments_that_evaluation_gives_it(tmp_path, seams):
    heard = []

    def listening(completions, **columns):
        heard.append(columns | {"completions": completions})
        return [0.5] * len(completions)

    of = replace(
        task(), rewards=[*task().rewards, listening], reward_weights=[0.5, 0.25, 0.125, 0.125]
    )
    trainer = make(tmp_path / "run", task=of, steps=1, seams=seams)
    trainer.train()
    (trained,) = heard
    asked = {row["question"]: row for row in of.train}
    rows = [asked[question] for question in trained["question"]]
    assert (
        trained["prompts"] == of.render(trainer.tokenizer, rows)
        and len({*trained["prompts"]}) == 2
    )
    kit.evaluate(trainer.model, trainer.tokenizer, of, rows=rows)
    evaluated = heard[-1]
    assert trained.keys() - evaluated.keys() == {"log_extra", "log_metric"}
    assert evaluated.keys() <= trained.keys()
    same = evaluated.keys() - {"completions", "completion_ids"}
    assert {name: trained[name] for name in same} == {name: evaluated[name] for name in same}
