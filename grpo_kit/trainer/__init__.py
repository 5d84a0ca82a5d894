"""GRPOTrainer as most runs want it, and the hooks that it puts on the loop; presets.

presets.py         numbers of a run that fit this machine, each with its reason
grpo_trainer.py    GRPOTrainer: the loop with these hooks and the fast ways through a step
watch_run.py       the live chart, or a line a step; red flags; lines that are printed once; checkpoints by time
held_out_hook.py   held-out accuracy every so many steps; the best step's weights at the end
watchdog.py        a step that hangs says so while it hangs, and where
control_folder.py  what is asked of a run by its folder: change, pause, stop, save
job.py             what a run is made from, as a command line or run.json says it
"""
