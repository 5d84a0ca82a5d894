"""Training stops where evaluation does: at every end that tokenizer or model declares, and counts all as ends."""

import pytest
from loop_runs import letters, make, record

from grpo_kit.loop.hooks import Hook
from grpo_kit.models import load_policy
from grpo_kit.rollout.complete import complete
from grpo_kit.tasks import from_rows

LIMIT = 6
ROWS = [{"question": f"Say {i} and {'more ' * (i % 3)}:", "answer": str(i)} for i in range(8)]
OTHER = [{"question": "Say no.", "answer": "1"}]


@pytest.fixture(scope="module")
def model_with_two_ends():
    """As a real Qwen2.5, whose tokenizer knows one end, and its generation_config two; with what evaluation writes."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    task = from_rows("ends", ROWS, OTHER, reward=letters, max_completion_tokens=LIMIT)
    for parameter in model.model.layers.parameters():  # else it repeats the prompt's last token
        parameter.data *= 6 if parameter.ndim > 1 else 1
    prompts = task.render(tokenizer, task.train)
    written = [c.ids for c in complete(model, tokenizer, prompts, max_completion_tokens=LIMIT)]
    # A token that some rows write early and others never.
    early = [t for ids in written for t in ids[1:4] if t not in ids[:1]]
    second = next(t for t in early if sum(t in ids for ids in written) < len(written))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    made = complete(model, tokenizer, prompts, max_completion_tokens=LIMIT)
    evaluated = {row["question"]: one for row, one in zip(task.train, made, strict=True)}
    assert {c.cut_off for c in evaluated.values()} == {False, True}
    assert all(c.cut_off or c.ids[-1] == second for c in evaluated.values())
    return model, task, evaluated


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seams", ["fast", "plain"])
def test_training_ends_completions_where_evaluation_does(model_with_two_ends, seams, masked, tmp_path):
    """Greedy (top_k=1), so that both write the same; the weights stay."""
    model, task, evaluated = model_with_two_ends
    batches = []

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            batches.append((batch, trainer.update))

    trainer = make(
        tmp_path / "run", model=model, task=task, seams=seams, top_k=1, mask_cut_off=masked, learning_rate=1e-9,
        hooks=[Keep()], steps=len(task.train) // 2,
    )  # fmt: skip
    trainer.train()
    rows, cut = record(trainer.folder)[0], []
    for (batch, _), row in zip(batches, rows, strict=True):
        expected = [evaluated[one["question"]] for one in batch.rows]
        assert [tuple(ids) for ids in batch.completion_ids] == [e.ids for e in expected], "the end is there"
        assert batch.cut_off == [e.cut_off for e in expected]
        cut.append(sum(batch.cut_off) / len(batch))
        assert row["completion_length"] == pytest.approx(sum(e.tokens for e in expected) / len(expected))
    assert len(set(cut)) > 1 and [row["completion_cut_off"] for row in rows] == pytest.approx(cut)
