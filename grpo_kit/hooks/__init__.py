"""What hangs on the loop: each a Hook of at most four methods.

watch_run.py       the live chart, or a line a step; red flags
held_out_hook.py   held-out accuracy every so many steps; the best step's weights at the end
watchdog.py        a step that hangs says so while it hangs, and where
control_folder.py  what is asked of a run by its folder: change, pause, stop, save
standard.py        GRPOTrainer: the loop with these hooks and the fast ways through a step;
                   Autosave, a checkpoint every 5 minutes where none is due by steps; lines that are said once
"""
