"""`python -m grpo_kit doctor`: what a bug report needs, a check of every part on this machine, and what to do."""
