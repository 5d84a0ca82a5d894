"""`pytest -p card_plugin`: the tests on a pretend card; PRETEND_CARD names it (default rtx4090).

PRETEND_TRITON=0: without Triton, as on native Windows; the update then takes SDPA instead of FlexAttention.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import card  # noqa: E402

card.install(os.environ.get("PRETEND_CARD", "rtx4090"))
if os.environ.get("PRETEND_TRITON", "1") != "0":
    import flex_eager

    flex_eager.install()
