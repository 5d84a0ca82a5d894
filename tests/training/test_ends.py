"""Training stops where evaluation does: at every end that tokenizer or model declares, and counts all as ends."""

import pytest
from tiny_run import data, make

from grpo_kit.models import load_policy
from grpo_kit.record.files import read_metrics
from grpo_kit.rollout.complete import complete

LIMIT = 6


@pytest.fixture(scope="module")
def model_with_two_ends():
    """As a real Qwen2.5, whose tokenizer knows one end, and its generation_config two; with what evaluation writes."""
    model, tokenizer = load_policy("tiny-random", quiet=True)
    for parameter in model.model.layers.parameters():  # else it repeats the prompt's last token
        parameter.data *= 6 if parameter.ndim > 1 else 1
    written = [c.ids for c in complete(model, tokenizer, data()["prompt"], max_completion_tokens=LIMIT)]
    # A token that some rows write early and others never.
    early = [t for ids in written for t in ids[1:4] if t not in ids[:1]]
    second = next(t for t in early if sum(t in ids for ids in written) < len(written))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    evaluated = dict(
        zip(
            data()["prompt"],
            complete(model, tokenizer, data()["prompt"], max_completion_tokens=LIMIT),
            strict=True,
        )
    )
    shares = {c.cut_off for c in evaluated.values()}
    assert shares == {False, True} and any(c.tokens < LIMIT for c in evaluated.values())
    assert all(c.cut_off or c.ids[-1] == second for c in evaluated.values())
    return model, evaluated


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rollout", ["kit", "hf"])
def test_training_ends_completions_where_evaluation_does(model_with_two_ends, rollout, masked, tmp_path):
    """Greedy (top_k=1), so that both write the same; the weights stay."""
    model, evaluated = model_with_two_ends
    options = dict(top_k=1, max_completion_length=LIMIT, mask_truncated_completions=masked, learning_rate=0.0)
    trainer = make("kit", tmp_path, model=model, kit={"rollout": rollout}, max_steps=4, **options)
    batches, score = [], trainer._generate_and_score_completions

    def noting(inputs):
        batches.append((inputs, score(inputs)))
        return batches[-1][1]

    trainer._generate_and_score_completions = noting
    trainer.train()
    assert trainer.rollout == rollout
    cut = []
    for inputs, batch in batches:
        expected = [evaluated[row["prompt"]] for row in inputs]
        cut.append(sum(e.cut_off for e in expected) / len(expected))
        for e, ids, mask in zip(expected, batch["completion_ids"], batch["completion_mask"], strict=True):
            assert tuple(ids[: e.tokens].tolist()) == e.ids
            assert mask.sum() == (0 if masked and e.cut_off else e.tokens), "the end itself is trained"
    entries = [e for e in trainer.state.log_history if "completions/clipped_ratio" in e]
    assert len(set(cut)) > 1 and [e["completions/clipped_ratio"] for e in entries] == pytest.approx(cut)
    assert read_metrics(tmp_path)["completion_cut_off"].tolist() == pytest.approx(cut)
    ended = [
        [e.tokens for e in map(evaluated.get, (r["prompt"] for r in rows)) if not e.cut_off]
        for rows, _ in batches
    ]
    means = [sum(lengths) / len(lengths) if lengths else 0.0 for lengths in ended]
    assert [e["completions/mean_terminated_length"] for e in entries] == pytest.approx(means)
