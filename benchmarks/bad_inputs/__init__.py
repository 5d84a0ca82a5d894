"""Bad inputs at every public door of the kit, and what became of each; see __main__."""

import os

# a name that nobody has is not looked up for a minute
os.environ.setdefault("HF_HUB_OFFLINE", "1")
