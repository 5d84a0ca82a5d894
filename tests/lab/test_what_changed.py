"""What training changed: first choices beside a plain loop of forward passes, and the base's answers put right."""

import copy
import hashlib
import sys
from html.parser import HTMLParser

import few_words
import pandas as pd
import pytest
import torch

from grpo_kit import lab, tasks
from grpo_kit.models._adapters import add_adapters
from grpo_kit.more.lab.what_changed import Changes

ROWS = [{"question": f"Which letter is number {i}?", "answer": "x"} for i in range(6)]
OTHERS = [{"question": f"Which letter is not number {i}?", "answer": "x"} for i in range(6)]
HIDDEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")  # of a completion's text
LENGTH = 7


def fingerprint(completions, **columns):
    """A number in [0, 1) that is another for each text."""
    return [
        int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 for text in completions
    ]


def even(completions, answer, **columns):
    """Right is the row's answer, and half of all other texts: so that random models are right now and then."""
    halves = [hashlib.sha256(text.encode()).digest()[0] % 2 == 0 for text in completions]
    own = [f">{gold}<" in text for text, gold in zip(completions, answer, strict=True)]
    return [float(half or right) for half, right in zip(halves, own, strict=True)]


def task(reward=fingerprint):
    return tasks.from_rows("letters", OTHERS, ROWS, reward=reward, max_completion_tokens=LENGTH)


def base(ends=1.0):
    """(model, tokenizer): larger weights than tiny-random's, so that answers are not one token again and again.

    ends: how much longer the end token's row of the head is, so that more answers end.
    """
    model, tokenizer = few_words.policy()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(0.5 * torch.randn(weights.shape, generator=draw))
        model.lm_head.weight[tokenizer.eos_token_id] *= ends
    return model, tokenizer


def moved(model, size):
    """A copy with noise in its weights."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(size * torch.randn(weights.shape, generator=draw).to(weights.device))
    return model


def prompts_of(tokenizer):
    return [tokenizer(text)["input_ids"] for text in task().render(tokenizer, ROWS)]


@torch.no_grad()
def plainly(base, tuned, tokenizer, prompt, most):
    """The base's answer with `most` tokens put right, by a forward pass of each model a token; ids and changes."""
    ids, changes = list(prompt), []
    while len(ids) < len(prompt) + LENGTH:
        row = torch.tensor([ids], device=base.device)
        logits = base(row).logits[0, -1]
        token, first = logits.argmax().item(), tuned(row).logits[0, -1].argmax().item()
        if token != first and len(changes) < most:
            rank = logits.sort(descending=True).indices.tolist().index(first)
            changes.append((len(ids) - len(prompt), token, rank))
            token = first
        ids.append(token)
        if token == tokenizer.eos_token_id:
            break
    return ids[len(prompt) :], changes


def test_equal_models_differ_nowhere():
    model, tokenizer = base()
    changes = lab.what_changed(model, copy.deepcopy(model), tokenizer, task(even))
    assert (changes.tokens["rank"] == 0).all() and (
        changes.tokens["token"] == changes.tokens["base_token"]
    ).all()
    assert changes.share.value == 0 and changes.among_first is None and changes.gain_back == {}
    assert (
        str(changes)
        == f"Training changed 0 of {len(changes.tokens)} tokens of 6 greedy answers."
    )
    assert (changes.answers["base"] == changes.answers["tuned"]).all() and changes.pages().empty


@torch.no_grad()
def test_one_row_of_the_head_moved_changes_one_token():
    """The head's row of the base's fourth choice, moved along what sets the last token of one answer apart."""
    model, tokenizer = base()
    prompts, row = prompts_of(tokenizer)[:3], 2
    answers = [plainly(model, model, tokenizer, prompt, 0)[0] for prompt in prompts]
    assert len(answers[row]) == LENGTH, "the last token is cut off, so nothing comes behind it"
    hidden = []
    for prompt, ids in zip(prompts, answers, strict=True):
        read = torch.tensor([prompt + ids[:-1]], device=model.device)
        hidden.append(model.get_decoder()(read).last_hidden_state[0, -len(ids) :])
    last, others = (
        hidden[row][-1],
        torch.cat([*hidden[:row], hidden[row][:-1], *hidden[row + 1 :]]),
    )
    # 21 positions and 32 numbers: at all the others the moved logit stays what it was.
    logits = model.get_output_embeddings()(last)
    token = logits.sort(descending=True).indices[3].item()
    alone = torch.linalg.lstsq(
        torch.cat([others, last[None]]).double().cpu(), _one(len(others)).cpu()
    ).solution
    tuned = copy.deepcopy(model)
    # the embedding stays
    tuned.lm_head.weight = torch.nn.Parameter(tuned.lm_head.weight.clone())
    rise = logits.max() - logits[token] + 1
    tuned.lm_head.weight[token] += rise * (alone / (alone @ last.double().cpu())).to(last)
    changes = lab.what_changed(model, tuned, tokenizer, task(), rows=ROWS[:3])
    expected = [plainly(model, tuned, tokenizer, prompt, LENGTH)[1] for prompt in prompts]
    assert (
        [len(found) for found in expected] == [0, 0, 1] == changes.answers["changed"].tolist()
    )
    (change,) = changes.tokens[changes.tokens["rank"] > 0].to_dict("records")
    assert change == {"row": row, "token": token, "base_token": answers[row][-1], "rank": 3}
    assert changes.ranks.to_dict() == {3: 1} and changes.among_first.value == 1
    assert changes.share.value == pytest.approx(1 / LENGTH / 3)


def _one(zeros):
    return torch.tensor([0.0] * zeros + [1.0], dtype=torch.double)


@pytest.mark.parametrize("tile, ends", [(3, 1.0), (128, 1.0), (128, 2.5)])
def test_every_number_is_that_of_a_plain_loop(monkeypatch, tile, ends):
    monkeypatch.setattr(sys.modules[Changes.__module__], "_TILE", tile)  # positions at once
    model, tokenizer = base(ends)
    tuned = moved(model, 0.05)
    changes = lab.what_changed(model, tuned, tokenizer, task(), most=(4, 1, 2), batch_size=4)
    prompts = prompts_of(tokenizer)
    for name, most in {"base": 0, 1: 1, 2: 2, 4: 4, "tuned": LENGTH}.items():
        answers = [plainly(model, tuned, tokenizer, prompt, most)[0] for prompt in prompts]
        texts = [
            tokenizer.decode([i for i in ids if tokenizer.decode([i]) not in HIDDEN])
            for ids in answers
        ]
        assert changes.scores[name].tolist() == pytest.approx(fingerprint(texts), abs=1e-8), (
            name
        )
    assert list(changes.scores) == ["base", 1, 2, 4, "tuned"]
    for row, prompt in enumerate(prompts):
        ids, expected = plainly(model, tuned, tokenizer, prompt, LENGTH)
        found = changes.tokens[changes.tokens["row"] == row].reset_index(drop=True)
        assert found["token"].tolist() == ids
        changed = found[found["rank"] > 0]
        assert (
            list(zip(changed.index, changed["base_token"], changed["rank"], strict=True))
            == expected
        )
    counts = changes.answers
    assert counts["tokens"].lt(LENGTH).any() == (ends > 1) and counts["changed"].sum() > 12
    assert changes.share.value == pytest.approx((counts["changed"] / counts["tokens"]).mean())
    table = changes.table()
    assert table.loc["2 tokens put right", "value"] == pytest.approx(changes.scores[2].mean())


def test_of_two_equal_logits_the_first_is_the_first_choice():
    """Each odd token has the head's row of the even one before it; the tuned model's is a hundredth longer."""
    model, tokenizer = base()
    head = model.lm_head.weight.detach().clone()
    head[1::2] = head[: 2 * (len(head) // 2) : 2]
    head[-1] = 0  # it has none beside it
    model.lm_head.weight = torch.nn.Parameter(head)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.lm_head.weight[1::2] *= 1.01
    tokens = lab.what_changed(model, tuned, tokenizer, task()).tokens
    assert len(tokens) > 6 and (tokens["token"] == tokens["base_token"] + 1).all()
    assert (tokens["rank"] == 1).all()


def test_all_tokens_put_right_are_the_tuned_models_answers():
    model, tokenizer = base()
    tuned = moved(model, 0.05)
    changes = lab.what_changed(model, tuned, tokenizer, task(even), most=(1, LENGTH))
    results = {name: estimate.value for name, estimate in changes.results.items()}
    assert changes.measure == "accuracy" and results[LENGTH] == results["tuned"]
    assert changes.scores[LENGTH].equals(changes.scores["tuned"].rename(LENGTH))
    assert results["base"] < results[1] < results["tuned"] and changes.gain_back[LENGTH] == 1
    other = Changes(
        "",
        "accuracy",
        changes.answers,
        changes.tokens,
        _scores(base=1, k=3, tuned=5),
        tokenizer,
    )
    assert other.gain_back == {2: 0.5} and "comes back: 2 tokens put right 50.0 %." in str(
        other
    )
    # a loss; one row of six
    for scores in (_scores(base=5, k=3, tuned=1), _scores(base=1, k=1, tuned=2)):
        assert Changes("", "accuracy", None, None, scores, None).gain_back == {}


def _scores(*, base, k, tuned):
    """Scores of six rows, so many of them right."""
    right = {"base": base, 2: k, "tuned": tuned}
    return pd.DataFrame({name: [1.0] * n + [0.0] * (6 - n) for name, n in right.items()})


def test_without_a_base_the_adapters_are_switched_off():
    model, tokenizer = base()
    tuned = add_adapters(copy.deepcopy(model), "lora", {}, 0)
    fresh = lab.what_changed(None, tuned, tokenizer, task())
    assert fresh.answers["changed"].sum() == 0, "new adapters add nothing"
    with torch.no_grad():
        for name, weights in tuned.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.05)
    tuned.train()
    tuned.get_base_model().model.layers[0].eval()
    modes = [part.training for part in tuned.modules()]
    alone, beside = (lab.what_changed(one, tuned, tokenizer, task()) for one in (None, model))
    assert alone.answers["changed"].sum() > 6
    for frame in ("answers", "tokens", "scores"):
        pd.testing.assert_frame_equal(getattr(alone, frame), getattr(beside, frame))
    assert [part.training for part in tuned.modules()] == modes
    layer = tuned.get_base_model().model.layers[0].self_attn.q_proj
    assert not layer.disable_adapters and layer.active_adapters == ["default"]


class Page(HTMLParser):
    """The tags, the text and the titles of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.titles, self.marked = set(), "", [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        self.last = tag

    def handle_data(self, data):
        self.text += data
        if self.last == "mark":
            self.marked.append(data)

    def handle_endtag(self, tag):
        self.last = ""


def test_what_a_model_wrote_is_text_on_the_page():
    tokenizer = few_words.tokenizer()
    wrote, quote = "<script>alert('1 < 2')</script> \u00e9\U0001f642\n", '"><b onclick=x>'
    ids = [*tokenizer(wrote)["input_ids"], tokenizer.eos_token_id]
    tokens = pd.DataFrame(
        {"row": 0, "token": ids, "base_token": tokenizer(quote)["input_ids"][0], "rank": 0}
    )
    tokens.loc[[0, len(ids) - 2, len(ids) - 1], "rank"] = [2, 1, 7]
    answers = pd.DataFrame(
        {"question": ["<i>?</i>"], "answer": ["<u>"], "tokens": len(ids), "changed": 3}
    )
    answers = answers.assign(base=quote, tuned=wrote)
    shown = Changes(
        "", "accuracy", answers, tokens, _scores(base=1, k=3, tuned=5), tokenizer
    ).pages()
    page = Page(shown._repr_html_())
    assert page.tags == {"p", "div", "style", "span", "b", "mark"}
    assert (
        wrote.replace("\n", "\u23ce\n") in page.text
        and quote in page.text
        and "<i>?</i>" in page.text
    )
    assert page.marked == ["<", "\u23ce\n", tokenizer.eos_token] and "\ufffd" not in page.text
    first = tokenizer.decode(tokenizer(quote)["input_ids"][:1])
    assert page.titles[0] == f"rank 2 in the base's list; its first choice: {first!r}"
    assert '"' in first and len(page.titles) == 3 and "[[<]]script" in repr(shown)


class Played:
    """A task of several turns, as far as it is asked."""

    name, train, held_out = "played", ROWS, ROWS

    def play(self):
        """Never called."""


def test_what_cannot_be_compared_is_refused_by_name():
    model, tokenizer = base()
    lora = add_adapters(copy.deepcopy(model), "lora", {}, 0)
    wider = copy.deepcopy(model)
    wider.resize_token_embeddings(100)
    for arguments, options, words in [
        ((None, model, tokenizer, task()), {}, "base=None, and tuned has no peft adapters"),
        ((model, model, tokenizer, task()), {}, "base is tuned itself"),
        ((lora.get_base_model(), lora, tokenizer, task()), {}, "base is tuned itself"),
        (("runs/base", model, tokenizer, task()), {}, "base='runs/base' is no loaded model"),
        ((model, None, tokenizer, task()), {}, "tuned=None is no loaded model"),
        ((wider, model, tokenizer, task()), {}, "base has 100 tokens, tuned 2051"),
        (
            (model, wider, tokenizer, task()),
            {},
            "tokenizer writes token [0-9]+, tuned has 100 tokens",
        ),
        ((None, lora, tokenizer, task()), {"rows": []}, "rows is empty"),
        (
            (None, lora, tokenizer, task()),
            {"most": [0]},
            "most=0 must be a whole number of at least 1",
        ),
        ((None, lora, tokenizer, Played()), {}, "task 'played' is played in turns"),
    ]:
        with pytest.raises(ValueError, match=words):
            lab.what_changed(*arguments, **options)
