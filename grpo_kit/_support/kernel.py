"""Where output goes: to a notebook, or to a terminal, which must not obey what a model wrote."""

import re
import sys

_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: Lab, VS Code, Colab, nbclient, papermill; not terminal IPython."""
    # None too while another thread imports it
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask is not None and getattr(ask(), "kernel", None) is not None


def visible(text: object) -> str:
    r"""Text that a terminal prints and does not obey: everything that a model wrote goes through here before a print.

    Controls (an escape, a carriage return, C1), marks that turn or hide what follows, and halves of surrogate pairs are
    written as Python escapes. Line ends and tabs stay, and so do the joiners of scripts and emoji.

    >>> print(visible("\x1b]0;title\x07 4\r\u202e2"))
    \x1b]0;title\x07 4\r\u202e2
    """
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
