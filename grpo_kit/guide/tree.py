"""The tree behind which_method, as data: an answer leads to another question or to a method.

It keeps what needs a page for each: notebooks 04 to 12 show the methods, and notebook 15 measures some of what is said
about them, failures included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A leaf. trained, frozen: models in memory at once, at most. online: does it sample while it trains?

    see: a notebook. use: names of trl and of the kit. check: what to look at first. says: who advises it, by the
    letters of benchmarks/results/advice.md, or a paper. measured: names of that table's rows which bear on it, held or
    not.
    """

    why: str
    trained: int
    frozen: int
    data: str
    online: str
    see: str
    use: tuple[str, ...]
    check: str
    says: str
    measured: tuple[str, ...] = ()

    @property
    def models(self) -> str:
        """In words.

        >>> METHODS["DPO"].models
        '1 trained, 1 frozen'
        """
        return f"{self.trained} trained, {self.frozen} frozen" if self.trained else "none"


@dataclass(frozen=True)
class Question:
    """A fork. answers: value -> (its meaning, the name of the question or method it leads to)."""

    text: str
    answers: dict[str, tuple[str, str]]


FIRST = "judge"
QUESTIONS = {
    "judge": Question(
        "What can tell a good answer from a bad one?",
        {
            "program": ("a program: the right answer, a rule, a parser, tests", "success"),
            "both": ("a program, and I hold pairs (a better over a worse answer) as well", "DPO, then GRPO"),
            "people": ("no program: people, or a model that judges", "judgement"),
        },
    ),
    "success": Question(
        "How often is the untrained model right? (kit.readiness counts; 8 samples of some prompts are a start)",
        {
            "format first": ("most samples give no answer that can be read", "Prefill, then GRPO"),
            "never succeeds": ("hardly any prompt is right even once", "demonstrations"),
            "shortcut pays": (
                "one answer, given without reading the question, is right far more often",
                "Rows without a shortcut, then GRPO",
            ),
            "rarely succeeds": ("few groups hold right and wrong answers", "extra_samples"),
            "ready": ("many groups hold right and wrong answers", "unstable"),
            "too easy": ("nearly all samples are right", "Harder rows, or stop"),
        },
    ),
    "demonstrations": Question(
        "Are there demonstrations: good answers by people or a stronger model?",
        {
            "yes": ("yes, or they can be written", "SFT on demonstrations, then GRPO"),
            "no": ("no, and none can be had", "Softer reward or easier rows, then GRPO"),
        },
    ),
    "extra_samples": Question(
        "Can you sample many answers once, before training, and keep the right ones?",
        {
            "yes": (
                "yes, and enough prompts are right at least once",
                "SFT on its own right samples, then GRPO",
            ),
            "no": ("no, sampling is too dear", "GRPO with weights on positives"),
        },
    ),
    "unstable": Question(
        "Is there reason to expect instability?",
        {
            "no": ("no: a dense model, answers of moderate length, no trouble so far", "GRPO"),
            "yes": ("yes: a mixture of experts, very long answers, or runs that became unstable", "GSPO"),
        },
    ),
    "judgement": Question(
        "Which judgements do you have?",
        {
            "pairs": ("pairs: of two answers to a prompt, which is better", "reference"),
            "thumbs": ("single answers, each marked good or bad", "KTO"),
            "demonstrations only": ("good answers, and nothing to compare them with", "SFT"),
            "on demand": ("people or a judge model can go on comparing new samples", "groups"),
        },
    ),
    "reference": Question(
        "Does a frozen copy of the model fit beside the one that trains?",
        {
            "yes": ("yes (with LoRA always: the frozen base is the copy)", "agreement"),
            "no": ("no, one model is all that fits", "sft_done"),
        },
    ),
    "agreement": Question(
        "Would a second judge decide your pairs the same way?",
        {
            "mostly": ("mostly, but some are a matter of taste or wrong", "DPO"),
            "always": ("always: the differences are plain", "IPO"),
        },
    ),
    "sft_done": Question(
        "Has the model had its SFT, so that it answers in the right form?",
        {
            "yes": ("yes: an instruct model, or SFT of your own", "SimPO"),
            "no": ("no, it is a base model", "ORPO"),
        },
    ),
    "groups": Question(
        "Can each prompt be answered several times?",
        {
            "yes": ("yes, samples are cheap", "Reward model, then GRPO"),
            "no": ("no: episodes are long or dear", "Reward model, then PPO"),
        },
    ),
}

_KIT, _SFT, _DPO = "grpo_kit.GRPOTrainer", "trl.SFTTrainer", "trl.DPOTrainer"
_PROMPTS, _PAIRS = "prompts, and a program that scores answers", "pairs: prompt, chosen, rejected"
_07, _10, _11 = "07_warm_start.ipynb", "10_preferences_then_grpo.ipynb", "11_ppo_and_reward_models.ipynb"
_SFT_HELPS = ("sft-first-seconds",)
METHODS = {
    "DPO, then GRPO": Method(
        "DPO takes what the pairs say without sampling; GRPO then explores past them. If the pairs come from that very "
        "program, count seconds: in notebook 10 GRPO alone was ahead of both for the same time.",
        1, 1, f"{_PAIRS}; then {_PROMPTS}", "no, then yes", _10, (_DPO, _KIT, "grpo_kit.sample"),
        "kit.readiness after DPO: do groups still differ, or has it made all samples alike?", "E1",
    ),
    "Prefill, then GRPO": Method(
        "The task may be there and only its form missing. Put the opening tag into the model's mouth or show a worked "
        "example, which costs nothing, before you train anything; a brief SFT is next.",
        1, 0, _PROMPTS, "yes", "01_prompts_and_prefill.ipynb", (_KIT, "grpo_kit.build_prompt"),
        "kit.readiness again with the new prompt: another verdict?", "C3, A2, B2",
        ("prefill", *_SFT_HELPS),
    ),
    "SFT on demonstrations, then GRPO": Method(
        "GRPO makes likelier what a model sometimes does. What it never does has to be shown first.",
        1, 0, f"demonstrations; then {_PROMPTS}", "no, then yes", _07, (_SFT, _KIT),
        "kit.readiness after SFT: go on once groups hold right and wrong answers.", "D2, D3, A2, B2", _SFT_HELPS,
    ),
    "Softer reward or easier rows, then GRPO": Method(
        "Where every reward is 0, all advantages are 0. Partial credit or easier rows make groups differ; where "
        "neither can, take a stronger model.",
        1, 0, _PROMPTS, "yes", "02_reward_design.ipynb", (_KIT, "grpo_kit.rewards.check_rewards"),
        "check_rewards: what would a cheat earn from the softer reward?", "C4, E3, D3",
        ("soft-rewards",),
    ),
    "Rows without a shortcut, then GRPO": Method(
        "An answer that is right without reading the question is made likelier first, and once all samples say it "
        "groups no longer differ. Take rows on which no such answer pays, or lift the model above it before.",
        1, 0, _PROMPTS, "yes", "12_is_the_base_model_ready.ipynb", (_KIT, "grpo_kit.readiness"),
        "task.best_constant() on the new rows: is it near the model's own pass@1?", "D3",
    ),
    "SFT on its own right samples, then GRPO": Method(
        "The samples are scored by your reward, and SFT on the right ones makes them less rare; GRPO starts there.",
        1, 0, _PROMPTS, "no, then yes", _07, ("grpo_kit.sample", _SFT, _KIT),
        "samples.summary(): how many prompts were never right? Those are left out.", "A2, B2, arXiv:2308.01825",
        _SFT_HELPS,
    ),
    "GRPO with weights on positives": Method(
        "A few right answers stand against many wrong ones: weigh them more, or filter the wrong. Papers disagree "
        "(see the docstring), so compare with plain GRPO.",
        1, 0, _PROMPTS, "yes", "15_the_advice_measured.ipynb", ("grpo_kit.PositivesTrainer",),
        "frac_reward_zero_std: the share of groups that still teach nothing.", "B10",
        ("positives-upweighted", "negatives-filtered"),
    ),
    "GRPO": Method(
        "Groups differ, so the reward alone is enough. loss_type 'dapo' or 'dr_grpo' does not divide by a completion's "
        "own length; beta = 0 saves the reference.",
        1, 0, _PROMPTS, "yes", "05_train_full.ipynb", (_KIT, "grpo_kit.objectives.dr_grpo"),
        "task.best_constant(): what earns as much without reading the question?", "D1, A1, A7",
        ("dr-grpo-length", "no-kl"),
    ),
    "GSPO": Method(
        "One ratio a completion instead of one a token: importance_sampling_level='sequence'. Said to be steadier; the "
        "kit has tried it on short answers of a small dense model alone.",
        1, 0, _PROMPTS, "yes", "04_grpo_by_hand.ipynb", (_KIT, "grpo_kit.objectives.gspo"),
        "rollout/logprob_gap and kit.read_flags first: a sampler that is off looks like instability too.", "B14",
        ("sequence-level-slower", "sequence-level-steadier"),
    ),
    "Harder rows, or stop": Method(
        "Groups whose completions are all right teach nothing. Take harder rows, or use the model as it is.",
        0, 0, "harder prompts", "no", "12_is_the_base_model_ready.ipynb", ("grpo_kit.readiness",),
        "The best constant strategy: does the score come from the task, or from a shortcut?",
        "arXiv:2503.14476",
    ),
    "DPO": Method(
        "Trains on the pairs as they are: no sampling, no reward model. The frozen copy holds it near the start.",
        1, 1, _PAIRS, "no", _10, (_DPO, "grpo_kit.objectives.dpo"),
        "rewards/margins beside logps/chosen: the margin can grow while the chosen get less likely too.",
        "E1, arXiv:2305.18290",
    ),
    "IPO": Method(
        "On pairs without noise DPO's gap grows for ever; IPO's has a target. DPOTrainer with loss_type='ipo'.",
        1, 1, f"{_PAIRS}; decided without noise", "no", _10, (_DPO, "grpo_kit.objectives.ipo"),
        "The gap of log-ratios: does it settle near 1 / (2 beta)?", "arXiv:2310.12036",
    ),
    "SimPO": Method(
        "Compares mean log-probabilities a token and asks for a margin: no reference in memory. CPOTrainer with "
        "loss_type='simpo', cpo_alpha=0.",
        1, 0, _PAIRS, "no", _10, ("trl.experimental.cpo.CPOTrainer", "grpo_kit.objectives.simpo"),
        "Lengths, and what it could do before: nothing holds it near the start.", "arXiv:2405.14734",
    ),
    "ORPO": Method(
        "SFT on the chosen answers and a push away from the rejected ones in one loss: no reference, no SFT before.",
        1, 0, _PAIRS, "no", _10, ("trl.experimental.orpo.ORPOTrainer", "grpo_kit.objectives.orpo"),
        "Are the chosen answers good enough to imitate? SFT on them is part of the loss.", "arXiv:2403.07691",
    ),
    "KTO": Method(
        "Needs no pairs: good answers are pulled up, bad ones pushed down, against a frozen copy.",
        1, 1, "single answers with a label, good or bad", "no", _10, ("trl.KTOTrainer", "grpo_kit.objectives.kto"),
        "The balance of the labels, and the form: in notebook 10 one run of three lost part of its closing tags.",
        "arXiv:2402.01306",
    ),
    "SFT": Method(
        "Nothing says what is bad, so imitate what is good. If a judgement comes later, this is where to start from.",
        1, 0, "demonstrations", "no", _07, (_SFT,),
        "Held-out loss, and samples read by you: it learns the demonstrations' mistakes as well.", "A2, B2",
    ),
    "Reward model, then GRPO": Method(
        "Comparisons train a reward model, which pays GRPO. It will be fooled: keep a reference (beta > 0), and judge "
        "samples of the new policy again.",
        1, 2, f"{_PAIRS}; then prompts", "yes", _11, ("trl.RewardTrainer", _KIT, "grpo_kit.objectives.bradley_terry"),
        "Accuracy on held-out pairs, then tricks written by hand: which does it believe?", "arXiv:2203.02155",
    ),
    "Reward model, then PPO": Method(
        "A value model takes the place of the group, so one answer a prompt will do, and credit goes to tokens. It has "
        "to learn first, and four models fill the memory. trl has no PPO any more: notebook 11 writes it by hand.",
        2, 2, f"{_PAIRS}; then prompts", "yes", _11, ("trl.RewardTrainer", "grpo_kit.objectives.ppo_policy"),
        "Explained variance of the value model: near 0 it helps no more than a constant.", "B1",
    ),
}  # fmt: skip


def paths(name: str = FIRST, answers: dict[str, str] | None = None) -> Iterator[tuple[dict[str, str], str]]:
    """Every question and method at or below `name`, each with the answers that lead there.

    >>> next(answers for answers, name in paths() if name == "KTO")
    {'judge': 'people', 'judgement': 'thumbs'}
    """
    answers = answers or {}
    yield answers, name
    for value, (_, then) in QUESTIONS[name].answers.items() if name in QUESTIONS else ():
        yield from paths(then, {**answers, name: value})
