"""GRPOTrainer as most runs want it, and the hooks that it puts on the loop; presets.

presets.py         numbers of a run that fit this machine, each with its reason
grpo_trainer.py    GRPOTrainer: the loop with these hooks and the fast ways through a step
watch_run.py       the live chart, or a line a step; red flags; lines that are printed once; a step that hangs
held_out.py        held-out accuracy every so many steps; the best step's weights at the end
control_folder.py  what is asked of a run by its folder: change, pause, stop, save; checkpoints by time
"""
