"""The decision tree: its shape, what its leaves name, words and pages, and the widgets in a real kernel."""

import doctest
import importlib
import inspect
import re
import textwrap
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import grpo_kit as kit
from grpo_kit import objectives
from grpo_kit.evaluation.readiness import VERDICTS
from grpo_kit.guide.tree import FIRST, METHODS, QUESTIONS, paths
from grpo_kit.guide.which_method import Asking, method_html, which_method
from grpo_kit.preferences import Samples

ROOT = Path(__file__).parents[2]
ADVICE = (ROOT / "benchmarks" / "results" / "advice.md").read_text(encoding="utf-8")
TABLE = ADVICE[: ADVICE.index("## Asked again")]
ALL = list(paths())
LEAVES = [(answers, name) for answers, name in ALL if name in METHODS]

# What a practitioner would be told, written down without the tree.
EXPECTED = {
    "program, format first": "Prefill, then GRPO",
    "program, never succeeds, yes": "SFT on demonstrations, then GRPO",
    "program, never succeeds, no": "Softer reward or easier rows, then GRPO",
    "program, rarely succeeds, yes": "SFT on its own right samples, then GRPO",
    "program, rarely succeeds, no": "GRPO with weights on positives",
    "program, shortcut pays": "Rows without a shortcut, then GRPO",
    "program, ready, no": "GRPO",
    "program, ready, yes": "GSPO",
    "program, too easy": "Harder rows, or stop",
    "both": "DPO, then GRPO",
    "people, pairs, yes, mostly": "DPO",
    "people, pairs, yes, always": "IPO",
    "people, pairs, no, yes": "SimPO",
    "people, pairs, no, no": "ORPO",
    "people, thumbs": "KTO",
    "people, demonstrations only": "SFT",
    "people, on demand, yes": "Reward model, then GRPO",
    "people, on demand, no": "Reward model, then PPO",
}


# ---- the tree ---------------------------------------------------------------------------------------------------


def test_every_leaf_is_reached_by_the_answers_that_a_practitioner_would_give():
    assert {", ".join(answers.values()): name for answers, name in LEAVES} == EXPECTED


def test_it_is_a_tree():
    reached = Counter(name for _, name in ALL)
    assert set(reached) == set(QUESTIONS) | set(METHODS), "nothing is out of reach, nothing missing"
    assert set(reached.values()) == {1}, "one path to each"
    assert not set(QUESTIONS) & set(METHODS)
    assert ALL[0] == ({}, FIRST)


def test_at_most_four_questions_each_with_a_choice():
    assert max(len(answers) for answers, _ in LEAVES) == 4
    assert all(len(question.answers) >= 2 for question in QUESTIONS.values())
    for question in QUESTIONS.values():
        assert len({meaning for meaning, _ in question.answers.values()}) == len(question.answers)


def test_success_takes_the_verdicts_of_readiness():
    assert set(QUESTIONS["success"].answers) == set(VERDICTS)
    for verdict in VERDICTS:
        assert which_method(judge="program", success=verdict).answers["success"] == verdict


# ---- what the leaves name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_notebook_is_there(name):
    assert (ROOT / "notebooks" / METHODS[name].see).is_file()


@pytest.mark.parametrize("name", METHODS)
def test_what_it_uses_can_be_imported(name):
    assert METHODS[name].use
    for dotted in METHODS[name].use:
        module, _, attribute = dotted.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute)), dotted


def test_settings_that_the_leaves_name_exist():
    from trl import DPOConfig, GRPOConfig
    from trl.experimental.cpo import CPOConfig

    why = {name: method.why for name, method in METHODS.items()}
    settings = {"GSPO": (GRPOConfig, {"importance_sampling_level": "sequence"})}
    settings["IPO"] = (DPOConfig, {"loss_type": "ipo"})
    settings["SimPO"] = (CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0})
    for name, (config, values) in settings.items():
        named = dict(re.findall(r"(\w+)='?(\w+)'?", why[name]))
        assert named == {key: str(value) for key, value in values.items()}
        config(output_dir="unused", bf16=False, report_to="none", **values)
    for loss in re.findall(r"loss_type '(\w+)' or '(\w+)'", why["GRPO"])[0]:
        GRPOConfig(output_dir="unused", bf16=False, report_to="none", loss_type=loss, beta=0)


def test_metrics_and_methods_that_the_checks_name_exist():
    import trl

    dpo = inspect.getsource(inspect.getmodule(trl.DPOTrainer))
    checks = {name: method.check for name, method in METHODS.items()}
    for metric in ("rewards/margins", "logps/chosen"):
        assert metric in checks["DPO"] and f'"{metric}"' in dpo
    grpo = inspect.getsource(inspect.getmodule(trl.GRPOTrainer))
    assert (
        "frac_reward_zero_std" in checks["GRPO with weights on positives"]
        and '"frac_reward_zero_std"' in grpo
    )
    assert "rollout/logprob_gap" in checks["GSPO"]
    assert "rollout/logprob_gap" in (ROOT / "grpo_kit" / "training" / "update.py").read_text(encoding="utf-8")
    assert "samples.summary()" in checks["SFT on its own right samples, then GRPO"] and Samples.summary
    assert "task.best_constant()" in checks["GRPO"] and kit.tasks.Task.best_constant
    for name in re.findall(r"kit\.(\w+)", " ".join(checks.values())):
        assert name in kit.__all__


@pytest.mark.parametrize("name", METHODS)
def test_advice_has_a_source_and_measured_claims_are_rows_of_the_table(name):
    method = METHODS[name]
    marks = re.findall(r"\b[A-E]\d+\b", method.says)
    assert marks or re.search(r"arXiv:\d{4}\.\d{5}", method.says)
    assert all(f"**{mark[0]}** " in ADVICE for mark in marks), "its letter is explained under the table"
    for claim in method.measured:
        rows = [line for line in TABLE.splitlines() if line.startswith(f"| [{claim}]")]
        assert len(rows) == 1, claim
        link, by = re.search(r"\]\(\.\./\.\./notebooks/([^)]*)\)([^|]*) \|", rows[0]).groups()
        assert f'href="{link}"' in method_html(name)
        assert set(re.findall(r"[A-E]\d+", by)) & set(marks), "measured is what its advisers claim"


def test_models_in_memory_are_those_the_losses_and_the_advice_count():
    def total(name):
        return METHODS[name].trained + METHODS[name].frozen

    # As write-up E counts them; GRPO's second is the reference, which beta = 0 saves.
    assert {name: total(name) for name in ("DPO", "IPO", "KTO", "ORPO", "SimPO")} == {
        "DPO": 2, "IPO": 2, "KTO": 2, "ORPO": 1, "SimPO": 1,
    }  # fmt: skip
    assert METHODS["Reward model, then PPO"].models == "2 trained, 2 frozen"
    assert METHODS["Reward model, then GRPO"].models == "1 trained, 2 frozen"
    for name in ("DPO", "IPO", "KTO", "ORPO", "SimPO"):
        loss = next(used.rpartition(".")[2] for used in METHODS[name].use if ".objectives." in used)
        assert loss == name.lower()
        takes_reference = any(
            p.startswith("ref") for p in inspect.signature(getattr(objectives, loss)).parameters
        )
        assert METHODS[name].frozen == takes_reference
    assert METHODS["GRPO"].models == METHODS["SFT"].models == "1 trained, 0 frozen"
    assert METHODS["Harder rows, or stop"].models == "none"
    assert all(
        method.trained == 1 for name, method in METHODS.items() if "PPO" not in name and "stop" not in name
    )


def test_online_is_what_samples_while_it_trains():
    for name, method in METHODS.items():
        grpo = bool(re.search("GRPO|PPO|GSPO", name))
        first_offline = bool(re.search("^(SFT|DPO)", name))
        assert method.online == ("no, then yes" if grpo and first_offline else "yes" if grpo else "no"), name


# ---- answers in, words and page out -----------------------------------------------------------------------------


@pytest.mark.parametrize(("answers", "name"), LEAVES, ids=[name for _, name in LEAVES])
def test_all_answers_give_the_method_and_the_path(answers, name):
    choice = which_method(**dict(reversed(answers.items())))  # in any order
    assert choice.reached == name and choice.method is METHODS[name] and choice.question is None
    assert list(choice.answers.items()) == list(answers.items())
    words, page = repr(choice), choice._repr_html_()
    places = [words.index(f"{question}={value!r}: {QUESTIONS[question].answers[value][0]}\n")
              for question, value in answers.items()]  # fmt: skip
    assert places == sorted(places) and words.index(f"-> {name}\n") > places[-1]
    told = page_text(page)
    for text in (
        METHODS[name].why,
        METHODS[name].data,
        METHODS[name].models,
        METHODS[name].check,
        METHODS[name].says,
    ):
        assert text in words and text in told
    assert re.findall('href="([^"#]+)"', page)[0] == METHODS[name].see
    assert page.count("<a ") == page.count('target="_blank" rel="noopener">') > 0, "in tabs of their own"
    assert all(QUESTIONS[question].text in told for question in answers)
    assert len(page) < 5000


@pytest.mark.parametrize(
    ("answers", "name"), [p for p in ALL[1:] if p[1] in QUESTIONS], ids=lambda p: str(p)[:30]
)
def test_too_few_answers_give_the_next_question(answers, name):
    choice = which_method(**answers)
    assert choice.reached == name and choice.question is QUESTIONS[name] and choice.method is None
    words, told = repr(choice), page_text(choice._repr_html_())
    for text in (words, told):
        assert QUESTIONS[name].text in text
        asked = re.findall(rf"{name}='([^']*)'", text)
        assert asked == list(QUESTIONS[name].answers)
        assert all(meaning in text for meaning, _ in QUESTIONS[name].answers.values())
    assert not any(f"-> {method}" in words for method in METHODS)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"judge": "rule"}, r"judge='rule' must be one of 'program' \(a program"),
        ({"judge": None}, "judge=None must be one of"),
        ({"judge": ["people"]}, r"judge=\['people'\] must be one of"),
        ({"judge": "program", "success": "often"}, "success='often' must be one of .*'too easy'"),
        ({"judges": "people"}, "judges='people' answers no question; the questions are judge, success"),
        (
            {"success": "ready"},
            "success='ready' is asked only after judge='program'; answer so, or leave success out",
        ),
        ({"judge": "people", "success": "ready"}, "success='ready' is asked only after judge='program'"),
        (
            {"judge": "people", "judgement": "pairs", "agreement": "always"},
            "agreement='always' is asked only after judge='people', judgement='pairs', reference='yes'",
        ),
        ({"judge": "both", "groups": "yes"}, "groups='yes' is asked only after"),
    ],
)
def test_a_wrong_answer_is_refused(answers, message):
    with pytest.raises(ValueError, match=message):
        which_method(**answers)


def test_outside_a_notebook_the_whole_tree_is_printed(capsys):
    assert which_method() is None
    said = capsys.readouterr().out
    for question in QUESTIONS.values():
        assert said.count(question.text) == 1
    for name, method in METHODS.items():
        assert said.count(f"-> {name} ({method.see})\n") == 1
    depths = [len(line) - len(line.lstrip()) for line in said.splitlines() if line.lstrip().startswith("->")]
    assert depths == [4 * len(answers) for answers, _ in LEAVES], "indented by the questions above it"
    assert "kit.which_method(judge='program')" in said
    which_method(judge="both")
    assert capsys.readouterr().out == ""


def test_examples_give_what_they_say():
    for name in ("grpo_kit.guide.tree", "grpo_kit.guide.which_method"):
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted >= 2 and result.failed == 0


# ---- widgets ----------------------------------------------------------------------------------------------------


def titles(asking):
    return [re.sub("<[^>]*>", "", part.value) for part in asking.widget.children[:-1:2]]


@pytest.mark.parametrize(("answers", "name"), LEAVES, ids=[name for _, name in LEAVES])
def test_the_widgets_ask_one_question_after_the_other(answers, name):
    asking = Asking()
    for n, (question, value) in enumerate(answers.items(), 1):
        assert list(asking.fields)[n - 1 :] == [question] and asking.fields[question].value is None
        assert asking.view.value == "", "no method yet"
        options = [(meaning, v) for v, (meaning, _) in QUESTIONS[question].answers.items()]
        assert list(asking.fields[question].options) == options
        asking.fields[question].value = value
    assert asking.view.value == method_html(name)
    assert asking.choice == which_method(**answers)
    assert len(titles(asking)) == len(answers)
    assert page_text(titles(asking)[-1]) == f"{len(answers)}. {QUESTIONS[list(answers)[-1]].text}"
    assert list(asking.widget.children[1:-1:2]) == list(asking.fields.values())
    assert asking.widget.children[-1] is asking.view


def test_going_back_changes_the_rest():
    asking = Asking()
    asking.fields["judge"].value = "people"
    asking.fields["judgement"].value = "pairs"
    asking.fields["reference"].value = "yes"
    asking.fields["agreement"].value = "always"
    assert "<b>IPO</b>" in asking.view.value
    old = asking.fields["agreement"]
    asking.fields["reference"].value = "no"
    assert list(asking.fields) == ["judge", "judgement", "reference", "sft_done"] and asking.view.value == ""
    assert old.comm is None, "what is gone is closed"
    asking.fields["sft_done"].value = "no"
    assert "<b>ORPO</b>" in asking.view.value
    asking.fields["sft_done"].value = "yes"
    assert "<b>SimPO</b>" in asking.view.value and len(asking.fields) == 4
    asking.fields["judgement"].value = "thumbs"
    assert "<b>KTO</b>" in asking.view.value and list(asking.fields) == ["judge", "judgement"]
    asking.fields["judge"].value = "program"
    assert list(asking.fields) == ["judge", "success"] and asking.view.value == ""
    assert asking.choice.answers == {"judge": "program"}


def test_a_saved_notebook_keeps_the_tree():
    bundle = Asking()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    told = page_text(bundle["text/html"])
    assert all(question.text in told for question in QUESTIONS.values())
    for name, method in METHODS.items():
        assert f"→ {name}, {method.see}" in told and f"-> {name} ({method.see})" in bundle["text/plain"]
    assert len(bundle["text/html"]) < 10_000


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_in_a_kernel_a_person_gets_widgets_and_papermill_the_tree():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT))
    try:

        def shown(code, stdin=True):
            results = []

            def keep(message):
                assert message["msg_type"] != "error", message["content"]
                if message["msg_type"] == "execute_result":
                    results.append(message["content"]["data"])

            client.execute_interactive(
                textwrap.dedent(code), allow_stdin=stdin, output_hook=keep, timeout=300
            )
            return results[-1] if results else None

        shown("from grpo_kit.guide.which_method import which_method")
        alone = shown("which_method()", stdin=False)
        assert WIDGET not in alone and "<ul>" in alone["text/html"]
        assert WIDGET in shown("asking = which_method(); asking")
        for question, index in (("judge", 2), ("judgement", 1)):
            comm = eval(shown(f"asking.fields[{question!r}].model_id")["text/plain"])
            content = {
                "comm_id": comm,
                "data": {"method": "update", "state": {"index": index}, "buffer_paths": []},
            }
            # As a click in JupyterLab does.
            client.shell_channel.send(client.session.msg("comm_msg", content))
        assert "-> KTO" in shown("asking.choice")["text/plain"]
        assert "<b>KTO</b>" in shown("asking.view.value")["text/plain"]
        without = shown("import sys; sys.modules['ipywidgets'] = None; which_method()")
        assert WIDGET not in without and "<ul>" in without["text/html"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Text(HTMLParser):
    """The text of a page; refuses tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag != "br")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page_text(page):
    parser = Text()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser.text


def test_what_stands_in_the_tree_is_text_in_the_page():
    assert "judge=&#x27;people&#x27;" in which_method(judge="people")._repr_html_()
    assert "model&#x27;s mouth" in method_html("Prefill, then GRPO")
