"""Which method for which data and reward? A decision tree that asks and answers; the tree itself is tree.py."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from dataclasses import dataclass
from typing import Any

from grpo_kit.display import in_notebook, widget_bundle
from grpo_kit.guide.tree import FIRST, METHODS, QUESTIONS, Method, Question, paths

_HOW = "Answer by keyword, such as kit.which_method(judge='program'): each answer brings the next question."
_MEASURED = "measured, held or not"  # whether it held stands in notebook 15, which is run again now and then


@dataclass(frozen=True, repr=False)
class Choice:
    """Answers, and where they lead. Made by which_method(); without answers it shows the whole tree.

    answers: question -> value, in the order asked. reached: the name of the next question, or of the method.
    """

    answers: dict[str, str]
    reached: str

    @property
    def question(self) -> Question | None:
        """What is asked next; None at a method."""
        return QUESTIONS.get(self.reached)

    @property
    def method(self) -> Method | None:
        """The method; None while a question is open."""
        return METHODS.get(self.reached)

    def __repr__(self) -> str:
        if not self.answers:
            return f"{_tree_text(FIRST)}\n\n{_HOW}"
        lines = [f"{name}={value!r}: {_meaning(name, value)}" for name, value in self.answers.items()]
        if self.method is not None:
            rows = _rows(self.method).items()
            return "\n".join([*lines, f"-> {self.reached}", *(f"   {key}: {text}" for key, text in rows)])
        values = QUESTIONS[self.reached].answers
        options = [f"    {self.reached}={value!r}: {_meaning(self.reached, value)}" for value in values]
        return "\n".join([*lines, QUESTIONS[self.reached].text, *options])

    def _repr_html_(self) -> str:
        if not self.answers:
            return f"{_tree_html(FIRST)}<p>{html.escape(_HOW)}</p>"
        asked = [_answer_html(name, value) for name, value in self.answers.items()]
        path = "".join(
            f"<li>{html.escape(QUESTIONS[name].text)}<br>{line}</li>"
            for name, line in zip(self.answers, asked, strict=True)
        )
        return f"<ol>{path}</ol>{method_html(self.reached) if self.method else _open_html(self.reached)}"


class Asking:
    """One question after the other as widgets, the method beneath; made by which_method().

    Changing an answer drops the questions after it. choice: the Choice as it stands.
    """

    def __init__(self) -> None:
        import ipywidgets as w

        self._w = w
        self.fields: dict[str, Any] = {}  # question -> its radio buttons, in the order asked
        self.view = w.HTML()
        self.widget = w.VBox()
        self._show()

    @property
    def choice(self) -> Choice:
        """The answers given so far, and where they lead."""
        return _walk({name: field.value for name, field in self.fields.items() if field.value is not None})

    def _answered(self, name: str) -> None:
        for later in list(self.fields)[list(self.fields).index(name) + 1 :]:
            self.fields.pop(later).close()
        self._show()

    def _show(self) -> None:
        choice, w = self.choice, self._w
        if choice.question is not None:
            name = choice.reached
            options = [(meaning, value) for value, (meaning, _) in choice.question.answers.items()]
            field = w.RadioButtons(options=options, value=None, layout=w.Layout(width="max-content"))
            field.observe(lambda change: self._answered(name), "value")
            self.fields[name] = field
        self.view.value = method_html(choice.reached) if choice.method is not None else ""
        titles = [
            w.HTML(f"<b>{n}. {html.escape(QUESTIONS[q].text)}</b>") for n, q in enumerate(self.fields, 1)
        ]
        blocks = [part for pair in zip(titles, self.fields.values(), strict=True) for part in pair]
        self.widget.children = [*blocks, self.view]

    def __repr__(self) -> str:
        return repr(_walk({}))

    def _repr_mimebundle_(self, **options: Any) -> dict:
        """The widget, and for a saved notebook (which keeps no widgets) the whole tree."""
        tree = _walk({})
        return widget_bundle(self.widget, **options) | {
            "text/plain": repr(tree),
            "text/html": tree._repr_html_(),
        }


def which_method(**answers: str) -> Asking | Choice | None:
    """Which method for this data and this reward: at most four questions, then a method and why.

    Without answers: in a notebook the questions as widgets; where nobody can press them (papermill, nbclient) or
    without ipywidgets the whole tree; outside a notebook the tree is printed and None returned.
    answers: by question, as the tree names them, in any order. Too few give the next question and its answers.
    `success` takes the verdict of kit.readiness as it is.
    Raises ValueError for a value that is no answer, and for an answer to a question that is not asked on the way: who
    gives one expects it to count, and it would not.

    >>> which_method(judge="people", judgement="thumbs").reached
    'KTO'
    >>> which_method(judge="program", success="ready")
    judge='program': a program: the right answer, a rule, a parser, tests
    success='ready': many groups hold right and wrong answers
    Is there reason to expect instability?
        unstable='no': no: a dense model, answers of moderate length, no trouble so far
        unstable='yes': yes: a mixture of experts, very long answers, or runs that became unstable
    """
    choice = _walk(answers)
    if answers:
        return choice
    if not in_notebook():
        print(choice)
        return None
    return Asking() if _can_be_pressed() else choice


def method_html(name: str) -> str:
    """A method of METHODS as HTML, with links to notebooks that hold from within the folder notebooks/."""
    method = METHODS[name]
    rows = {key: html.escape(text) for key, text in _rows(method).items()}
    rows["see"] = _link(method.see, method.see)
    if method.measured:
        rows[_MEASURED] = "; ".join(
            _link(f"15_the_advice_measured.ipynb#{anchor(claim)}", claim) for claim in method.measured
        )
    left = "text-align:left;vertical-align:top;"
    cells = [
        f'<tr><td style="{left}">{key}</td><td style="{left}">{text}</td></tr>' for key, text in rows.items()
    ]
    return f"<p><b>{html.escape(name)}</b></p><table><tbody>{''.join(cells)}</tbody></table>"


def anchor(claim: str) -> str:
    """What the cell of a row in notebook 15 is linked by, made of the row's name.

    >>> anchor("not-below-0.7")
    'not-below-0-7'
    """
    return re.sub("[^a-z0-9]+", "-", claim.lower()).strip("-")


def _walk(answers: dict[str, str]) -> Choice:
    reached, given, path = FIRST, dict(answers), {}
    while reached in given:
        value, values = given.pop(reached), QUESTIONS[reached].answers
        if value not in list(values):
            options = ", ".join(f"{v!r} ({_meaning(reached, v)})" for v in values)
            raise ValueError(f"{reached}={value!r} must be one of {options}")
        path[reached] = value
        reached = values[value][1]
    for name, value in given.items():
        if name not in QUESTIONS:
            raise ValueError(
                f"{name}={value!r} answers no question; the questions are {', '.join(QUESTIONS)}"
            )
        before = next(answers for answers, node in paths() if node == name)
        needed = ", ".join(f"{question}={answer!r}" for question, answer in before.items())
        raise ValueError(f"{name}={value!r} is asked only after {needed}; answer so, or leave {name} out")
    return Choice(path, reached)


def _can_be_pressed() -> bool:
    """Whether widgets would reach a person: papermill and nbclient run cells without a way to ask for input."""
    kernel = sys.modules["IPython"].get_ipython().kernel
    return importlib.util.find_spec("ipywidgets") is not None and getattr(kernel, "_allow_stdin", True)


def _meaning(name: str, value: str) -> str:
    return QUESTIONS[name].answers[value][0]


def _rows(method: Method) -> dict[str, str]:
    rows = {"why": method.why, "models": method.models, "data": method.data, "samples online": method.online}
    rows |= {"use": ", ".join(method.use), "see": method.see, "check first": method.check}
    rows["said by"] = method.says
    return rows | ({_MEASURED: "; ".join(method.measured)} if method.measured else {})


def _tree_text(name: str, indent: str = "") -> str:
    if name in METHODS:
        return f"{indent}-> {name} ({METHODS[name].see})"
    lines = [indent + QUESTIONS[name].text]
    for value, (meaning, then) in QUESTIONS[name].answers.items():
        lines += [f"{indent}  {name}={value!r}: {meaning}", _tree_text(then, indent + "    ")]
    return "\n".join(lines)


def _tree_html(name: str) -> str:
    if name in METHODS:
        return f"→ <b>{html.escape(name)}</b>, {_link(METHODS[name].see, METHODS[name].see)}"
    items = [
        f"<li>{_answer_html(name, value)}{' ' if then in METHODS else '<br>'}{_tree_html(then)}</li>"
        for value, (_, then) in QUESTIONS[name].answers.items()
    ]
    return f"<i>{html.escape(QUESTIONS[name].text)}</i><ul>{''.join(items)}</ul>"


def _open_html(name: str) -> str:
    items = "".join(f"<li>{_answer_html(name, value)}</li>" for value in QUESTIONS[name].answers)
    return f"<p><b>{html.escape(QUESTIONS[name].text)}</b></p><ul>{items}</ul>"


def _answer_html(name: str, value: str) -> str:
    return f"<code>{name}={html.escape(repr(value))}</code> {html.escape(_meaning(name, value))}"


def _link(target: str, text: str) -> str:
    """In a tab of its own: in a widget a link would take the place of the notebook."""
    return f'<a href="{target}" target="_blank" rel="noopener">{html.escape(text)}</a>'
