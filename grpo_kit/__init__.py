"""grpo_kit: GRPO fine-tuning of small language models on one card, in notebooks."""
