"""The tests in card_tests/ need a card: a real one, or the pretend one that test_pretend_card.py starts them on."""

import torch

collect_ignore = [] if torch.cuda.is_available() else ["card_tests"]
