"""Is it a notebook that runs this?"""

import sys


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: Lab, VS Code, Colab, nbclient, papermill; not terminal IPython."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # None too while another thread imports it
    return ask is not None and getattr(ask(), "kernel", None) is not None
