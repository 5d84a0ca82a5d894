"""A model asked by hand says what it says when it is evaluated; base beside tuned; from an export, without the task."""

import io
import sys

import few_words
import pytest
import torch

import grpo_kit as kit
from grpo_kit import load_policy, tasks
from grpo_kit.engine.complete import complete
from grpo_kit.more.export import ExportError, export

BASE = str(few_words.folder())
TASK = tasks.largest(n_train=8, n_held_out=6)
QUESTION = TASK.held_out[0]["question"]


@pytest.fixture(scope="module")
def adapted():
    model, tokenizer = load_policy(BASE, tuning="lora", quiet=True)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    return model, tokenizer


def expected(model, tokenizer, **how):
    (made,) = complete(
        model,
        tokenizer,
        TASK.render(tokenizer, TASK.held_out[:1]),
        max_completion_tokens=12,
        **how,
    )
    return TASK.prefill + made.text


def test_the_response_is_that_of_the_trainings_prompt(adapted):
    asked = kit.chat(*adapted, task=TASK)
    assert asked.ask(QUESTION) == {"tuned": expected(*adapted)}
    assert "greedy, at most 12 tokens" in repr(asked)


def test_base_beside_tuned_is_the_adapter_off(adapted):
    both = kit.chat(*adapted, task=TASK, base=True).ask(QUESTION)
    base, tokenizer = load_policy(BASE, quiet=True)
    assert both == {
        "tuned": expected(*adapted),
        "without its adapter": expected(base, tokenizer),
    }
    assert both["tuned"] != both["without its adapter"]
    named = kit.chat(*adapted, task=TASK, base=BASE).ask(QUESTION)
    assert named == {"tuned": both["tuned"], "base": both["without its adapter"]}


@pytest.mark.parametrize("format", ["merged", "adapter"])
def test_an_export_needs_no_task(format, adapted, tmp_path):
    folder = tmp_path / "out"
    quant = "f32" if format == "merged" else None
    export(
        *adapted, folder, task=TASK, format=format, quant=quant, temperature=0.0, proof=False
    )
    asked = kit.chat(folder)
    assert asked.ask(QUESTION) == {str(folder): expected(*adapted)} and asked.tokens == 12
    both = kit.chat(folder, base=BASE).ask(QUESTION)
    base, tokenizer = load_policy(BASE, quiet=True)
    assert both["base"] == expected(base, tokenizer), (
        "the base is asked with the export's prompt"
    )
    with pytest.raises(ExportError, match="holds its prompt already; leave the task out"):
        kit.chat(folder, task=TASK)


def test_sampled_answers_move_on_and_come_again(adapted):
    asked, again = (kit.chat(*adapted, task=TASK, temperature=1.0, seed=3) for _ in range(2))
    said = [asked.ask(QUESTION)["tuned"] for _ in range(3)]
    assert len(set(said)) == 3 and said == [again.ask(QUESTION)["tuned"] for _ in range(3)]


def test_a_terminal_asks_until_an_empty_line(adapted, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"{QUESTION}\nwhat is <|im_end|>?\n{QUESTION}\n\nnot asked\n")
    )
    asked = kit.chat(*adapted, task=TASK)
    asked.run()
    out = capsys.readouterr().out
    assert len(asked.asked) == 2 and out.count(expected(*adapted)) == 2
    assert "holds the special token" in out, "a question that cannot be asked ends nothing"


def test_a_notebook_shows_a_field_and_the_responses(adapted):
    asked = kit.chat(*adapted, task=TASK, base=True)
    asked.ask(QUESTION)
    page = asked._repr_mimebundle_()["text/html"]
    assert "question 1" in page and "without its adapter" in page and "tuned" in page
    box = asked._field()
    (field, _), html = box.children[0].children, box.children[1]
    assert "question 1" in html.value
    field.value = QUESTION  # as typed
    assert len(asked.asked) == 2 and "question 2" in html.value and field.value == ""
    field.value = "what is <|im_end|>?"
    assert len(asked.asked) == 2 and "not asked" in html.value


def test_what_cannot_be_asked_is_refused(adapted):
    with pytest.raises(ExportError, match="has several turns"):
        kit.chat(*adapted, task=kit.episodes.grid(4, 4))
    with pytest.raises(ExportError, match="a model in memory needs its tokenizer"):
        kit.chat(adapted[0])
    with pytest.raises(ExportError, match="this model has none; name the base"):
        kit.chat(*load_policy(BASE, quiet=True), base=True)
    with pytest.raises(ExportError, match="temperature=-1 must be 0"):
        kit.chat(*adapted, temperature=-1)
