"""Fast ways through a step, for decoders whose only state is keys and values: same numbers, less work.

packed_update.py   log-probabilities and gradients of a step's completions as one tree of shared prefixes
packing.py         rows -> that tree, in chunks
update_memory.py   how much of it at once
cpu_lm_head.py     embedding and head on a CPU
fast.py            completions by grpo_kit.rollout's engine (EngineSample); both as `sample` and `update` of the loop,
                   or the plain ones where they do not fit
"""
