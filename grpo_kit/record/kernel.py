"""Is it a notebook that runs this, and which kernel?"""

import re
import sys


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: Lab, VS Code, Colab, nbclient, papermill; not terminal IPython."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)  # None too while another thread imports it
    return ask is not None and getattr(ask(), "kernel", None) is not None


def kernel_id() -> str | None:
    """The name of this kernel at its Jupyter server; None outside a notebook and where no server began it."""
    if not in_notebook():
        return None
    kernel = sys.modules["IPython"].get_ipython().kernel
    file = getattr(getattr(kernel, "parent", None), "connection_file", "") or ""
    found = re.search(r"kernel-([0-9a-f-]{36})\.json$", file)
    return found[1] if found else None
