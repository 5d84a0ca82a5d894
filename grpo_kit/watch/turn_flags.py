"""Red flags of several turns, in the metrics of episodes; flags.py has the others."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_kit.watch.red_flag import WINDOW, Setup, Sign, column, over_window, red_flag


@red_flag(
    "invalid actions",
    lasted=WINDOW,
    why="A turn whose action cannot be read is lost, and its tokens are trained on all the same.",
    first="worked episodes that show the form of an action, a shorter form, or a system text that names all actions",
)
def invalid_actions(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps: more than half of the turns, or a quarter more than in the best 5 steps before."""
    share = over_window(table, "episodes/invalid")
    best = pd.Series(share).cummin().to_numpy()
    return (
        (share > 0.5) | (share > best + 0.25),
        lambda at: f"{share[at]:.0%} of the actions could not be read, where {best[at]:.0%} was the best",
    )


@red_flag(
    "endless episodes",
    lasted=WINDOW,
    why="What is cut at the last turn earned nothing for ending, and costs the most tokens.",
    first="see in browse what the last turns say; a reward for ending, a discount, or more turns where they are needed",
)
def endless_episodes(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps nine in ten episodes ended at the most turns, more than in the first three steps."""
    share = over_window(table, "episodes/unfinished")
    first = column(table, "episodes/unfinished")[:3].mean() if len(table) else np.nan
    return (
        (share > 0.9) & (share > first + 0.1),
        lambda at: f"{share[at]:.0%} of the episodes ended at the most turns, {first:.0%} at first",
    )


@red_flag(
    "lost focus",
    lasted=WINDOW,
    why="The same action again to the same reply leads nowhere; small models lose the thread over turns.",
    first="repeat the goal and the last actions in every turn (View(repeat_goal=True, actions=2))",
)
def lost_focus(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps half of the turns repeat the last one, action and reply; a quarter more than in the best five."""
    share = over_window(table, "episodes/repeated")
    best = pd.Series(share).cummin().to_numpy()
    return (
        (share > 0.5) & (share > best + 0.25),
        lambda at: (
            f"{share[at]:.0%} of the turns repeat the last one, action and reply, where {best[at]:.0%} was the least"
        ),
    )


@red_flag(
    "forking turns",
    lasted=WINDOW,
    why="Each such turn reads its history anew, in sampling and in training: the cost grows with its square.",
    first="kit.audit_turns(tokenizer) says what the template changes; View(chat=False) shows a few actions instead",
)
def forking_turns(table: pd.DataFrame, setup: Setup) -> Sign:
    """Over 5 steps half of what later turns read was read before. A dropped thought costs next to nothing."""
    share = over_window(table, "episodes/reread")
    return (
        share > 0.5,
        lambda at: f"{share[at]:.0%} of what later turns read was read before, and is computed anew",
    )


OF_EPISODES = (invalid_actions, endless_episodes, lost_focus, forking_turns)
"""On the rows of steps that sampled, where the run has episodes."""
