"""One step over several turns beside trl's tool loop: the same episodes, token for token, in one process.

    python -m benchmarks.tool_loop                 # 4 prompts x 8 episodes x 4 turns, 3 rounds: some 10 minutes
    python -m benchmarks.tool_loop --examples 0    # without the worked conversation in every prompt

Arms: "trl", trl.GRPOTrainer with environment_factory, which samples turn after turn anew from the whole text and trains
one long row an episode, what tools said masked; "kit", the loop on an EpisodeTask, whose turns go on from each other's
keys and are rows that share what they have in common.
Completions are forced, so that every arm samples the same tokens; the template keeps all that was said, so that the
long row and the turns are the same texts: loss and gradient norm must agree, or it stops. Before it compares arms it
prints what else differs between them.
Writes benchmarks/results/tool_loop_cpu.json: of each round the seconds of sampling and of the rest of the step, and
the tokens that went through the model.
Longer than 300 lines because the environment, both arms and the check that they did the same work are read together.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import LogitsProcessorList, TrainerCallback, set_seed
from transformers.utils import get_json_schema

from benchmarks.result import RESULTS, WEIGHTS, command_line, origin, save, spread
from benchmarks.step import arms, trl_arms
from benchmarks.step.busy import OtherLoad, wait_until_quiet
from benchmarks.step.forcing import ForcedCompletions
from benchmarks.step.tokens import TokenCount
from grpo_kit.engine import RolloutEngine
from grpo_kit.loop import Batch, Config, Loop
from grpo_kit.loop.protocols import Hook
from grpo_kit.models import load_policy
from grpo_kit.more.episodes import EpisodeTask, View
from grpo_kit.more.episodes._episode_sample import fast_episodes
from grpo_kit.prompts import opening_messages

MODEL = "smollm2-135m-instruct"
TURNS, PROMPTS, GROUP = 4, 4, 8
WALK = ("up", "down", "left", "right")
# SmolLM2's own has no tools
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
ARMS = ("trl", "kit")
RATE = 1e-7
LONGEST = 640  # tokens of a whole episode behind its prompt, for trl
TOLERANCE = 5e-3  # relative; see benchmarks/step/run.py


class Walk:
    """Row: goal, a way of four moves. Pays a quarter for each that is right; ends after four turns."""

    def reset(self, row: dict) -> str:
        self.way, self.turn = row["way"].split(), 0
        return row["question"]

    def step(self, text: str) -> tuple[str, float, bool]:
        said = text.rsplit('"action": "', 1)[-1].split('"')[0]
        right = said.split()[-1] == self.way[self.turn]
        self.turn += 1
        return (
            f"<tool_response>\nYou went {said}. {'Good.' if right else 'No.'}\n</tool_response>",
            right / TURNS,
            (self.turn == TURNS),
        )


class WalkForTRL:
    """The same for trl's environment_factory: one tool, and the sum of what was paid."""

    def __init__(self) -> None:
        self._inner, self._total = Walk(), 0.0

    def reset(self, **row: Any) -> None:
        self._inner.reset(row)
        self._total = 0.0

    def act(self, action: str) -> str:
        """
        Do one thing.

        Args:
            action: What to do, in words.
        """
        said, reward, _ = self._inner.step(f'"action": "{action}"')
        self._total += reward
        return said.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def rows() -> list[dict]:
    """Questions, each with a way of its own."""
    rng = random.Random(0)
    ways = [" ".join(rng.choice(WALK) for _ in range(TURNS)) for _ in range(PROMPTS + 1)]
    return [
        {"question": f"Find the way out of room {i}.", "way": way} for i, way in enumerate(ways)
    ]


def scripts(tokenizer: Any) -> list[list[list[int]]]:
    """What each episode writes: a call a turn, of one to four words, no two first ones of a group alike."""
    rng, made = random.Random(1), []
    for i in range(PROMPTS * GROUP):
        turns = []
        for turn in range(TURNS):
            words = [rng.choice(WALK) for _ in range(1 + (i + turn) % GROUP % 4)]
            if turn == 0:  # told apart by a number
                words = [str(i % GROUP), *words]
            call = json.dumps({"name": "act", "arguments": {"action": " ".join(words)}})
            text = f"<tool_call>\n{call}\n</tool_call>"
            turns.append(
                [
                    *tokenizer(text, add_special_tokens=False)["input_ids"],
                    tokenizer.eos_token_id,
                ]
            )
        made.append(turns)
    return made


def worked_conversation() -> list[tuple[str, str]]:
    """What a worked episode's turns read and write."""
    walk, moves = Walk(), ("up", "left", "up", "down")
    seen, turns = (
        walk.reset({"question": "Find the way out of the hall.", "way": "up left left down"}),
        [],
    )
    for move in moves:
        call = json.dumps({"name": "act", "arguments": {"action": move}})
        turns.append((seen, f"<tool_call>\n{call}\n</tool_call>"))
        seen, _, _ = walk.step(call)
    return turns


# ---- the arms ---------------------------------------------------------------------------------------------------


def make_trl(model: Any, tokenizer: Any, folder: str, options: argparse.Namespace) -> Any:
    """trl's trainer of two steps on the four rows."""
    args = trl.GRPOConfig(
        folder, max_completion_length=LONGEST, learning_rate=RATE, lr_scheduler_type="constant", warmup_steps=0,
        max_steps=2, num_generations=GROUP, per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP // options.micro_batch, shuffle_dataset=False, loss_type="dapo",
        epsilon_high=0.28, beta=0.0, max_tool_calling_iterations=TURNS - 1, logging_steps=1, save_strategy="no",
        report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, seed=0, activation_checkpointing=False,
    )  # fmt: skip
    task = task_of(tokenizer, options.examples)
    shown = opening_messages(None, task.view.example_pairs())
    asked = [
        {"prompt": [*shown, {"role": "user", "content": row["question"]}], **row}
        for row in task.train
    ]
    return trl.GRPOTrainer(
        model,
        paid,
        args,
        Dataset.from_list(asked),
        processing_class=tokenizer,
        environment_factory=WalkForTRL,
    )


def make_kit(model: Any, tokenizer: Any, folder: str, options: argparse.Namespace) -> Loop:
    """The loop of two steps on the four rows, in their order."""
    config = Config(
        steps=2,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        learning_rate=RATE,
        warmup=0,
        optimizer="adamw",
    )
    seams, task = fast_episodes(model, config), task_of(tokenizer, options.examples)

    def in_order(model: Any, tokenizer: Any, task: EpisodeTask, _: Any, *more: Any) -> Batch:
        return seams.sample(model, tokenizer, task, task.train, *more)

    return Loop(
        model, task, config, tokenizer=tokenizer, folder=Path(folder) / "run", sample=in_order, update=seams.update,
    )  # fmt: skip


def task_of(tokenizer: Any, examples: int) -> EpisodeTask:
    """The rows as episodes, whose prompts are word for word those of trl's loop."""
    asked = [{"role": "user", "content": "?"}]
    tools = [get_json_schema(WalkForTRL().act)]
    text = tokenizer.apply_chat_template(asked, tools=tools, tokenize=False)
    view = View(
        chat=True,
        system=text.split("<|im_start|>system\n")[1].split("<|im_end|>")[0],
        examples=(("", worked_conversation()),) * examples,
        write=lambda goal, actions, seen: seen,
    )
    made = rows()
    return EpisodeTask(
        "walk",
        made[:PROMPTS],
        made[PROMPTS:],
        Walk,
        view,
        max_turns=TURNS,
        max_completion_tokens=48,
    )


def paid(completions: list, way: list[str], **columns: Any) -> list[float]:
    """What the environment would have paid for the calls of each conversation."""
    totals = []
    for messages, right in zip(completions, way, strict=True):
        walk, total = Walk(), 0.0
        walk.reset({"question": "", "way": right})
        for message in messages:
            for call in message.get("tool_calls") or ():
                total += walk.step(json.dumps(call["function"]))[1]
        totals.append(total)
    return totals


# ---- one measurement --------------------------------------------------------------------------------------------


class Watch(TrainerCallback, Hook):
    """Seconds, tokens and texts of the second step: of a run's many, neither the first nor the last."""

    def __init__(self, count: TokenCount) -> None:
        self.count, self.seconds, self.sampling = count, {}, 0.0
        self.found: dict[str, Any] = {}

    def _start(self) -> None:
        self._begun, self.sampling = time.perf_counter(), 0.0
        self.count.start()

    def _stop(self) -> None:
        step = time.perf_counter() - self._begun
        self.seconds = {"step": step, "sampling": self.sampling, "rest": step - self.sampling}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """trl's."""
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """trl's."""
        self._stop()

    def before_step(self, trainer: Loop) -> None:
        """The loop's."""
        self._start()

    def after_step(self, trainer: Loop, row: dict[str, Any], batch: Batch) -> None:
        """The loop's. An episode's text is its last turn's prompt and completion."""
        self._stop()
        texts = [(*p, *c) for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
        self.found = {name: row[name] for name in ("loss", "grad_norm", "reward")}
        self.found["episodes"] = sorted(texts[TURNS - 1 :: TURNS])

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sampling, inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.sampling += time.perf_counter() - begun


@contextmanager
def forced(
    model: Any, eos: int, written: list[list[list[int]]], watch: Watch
) -> Iterator[None]:
    """Every sampler writes the scripts, turn by turn; what it would have drawn is computed all the same."""
    turn, count = 0, watch.count

    def watched(inner: Callable[..., Any], engine: bool) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            nonlocal turn
            turn += 1
            forcing = ForcedCompletions(
                [episode[(turn - 1) % TURNS] for episode in written], eos
            )
            plain = LogitsProcessorList([lambda ids, scores: forcing(ids, scores)])
            more = {"processors": (forcing,)} if engine else {"logits_processor": plain}
            count.in_rollout = True
            try:
                with watch.sampled(), count.unwatched() if engine else nullcontext():
                    made = inner(*args, **kwargs, **more)
            finally:
                count.in_rollout = False
            count.sampled(forcing.decoded)
            count.report(getattr(made, "tokens", None))
            return made

        return generate

    model.generate = watched(model.generate, False)
    inner = RolloutEngine.generate
    RolloutEngine.generate = watched(inner, True)
    try:
        yield
    finally:
        RolloutEngine.generate = inner


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two steps of a fresh trainer from the same weights; the second one's numbers."""
    set_seed(0)
    model, tokenizer = load_policy(MODEL, quiet=True)
    tokenizer.chat_template = TEMPLATE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        trainer = (make_trl if arm == "trl" else make_kit)(model, tokenizer, folder, options)
        watch = Watch(TokenCount(model))
        heads = trl_arms.heads if arm == "trl" else arms.heads
        load = OtherLoad()
        load.start()
        with forced(model, tokenizer.eos_token_id, scripts(tokenizer), watch), heads(watch):
            if arm == "trl":
                train_trl(trainer, watch)
            else:
                trainer.hooks.insert(0, watch)
                trainer.train()
        watch.count.close()
    return watch.found | {
        "seconds": watch.seconds,
        "tokens": watch.count.tokens(),
        "others": load.stop(),
    }


def train_trl(trainer: Any, watch: Watch) -> None:
    """trl's two steps, with the texts and numbers of the second kept."""
    trainer.add_callback(watch)
    inner = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        output = inner(inputs)
        made = []
        for i in range(len(output["prompt_ids"])):
            prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
            completion = output["completion_ids"][i][
                output["completion_mask"][i].bool()
            ].tolist()
            made.append((*prompt, *completion))
        watch.found["episodes"] = sorted(made)
        return output

    trainer._generate_and_score_completions = noted
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    watch.found |= {name: logged[name] for name in ("loss", "grad_norm", "reward")}


def check_same(first: dict[str, Any], other: dict[str, Any], arm: str) -> None:
    """Raises SystemExit unless both trained on the same texts, with the same rewards, loss and gradient norm."""
    if first["episodes"] != other["episodes"]:
        raise SystemExit(f"{arm}: the episodes are other texts than trl's")
    for name, least in (("reward", 0.0), ("loss", 0.1), ("grad_norm", 0.0)):
        a, b = first[name], other[name]
        if abs(a - b) > TOLERANCE * max(abs(a), least):
            raise SystemExit(f"{arm}: {name} is {b}, trl's {a}")


def main() -> None:
    """Measure in turns, check, print, save."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--examples", type=int, default=3, help="worked conversations in every prompt"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=2, help="of trl's update; 2 is its fastest on a CPU"
    )
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(
        "What else differs: trl reads each turn's whole text anew and pads it; its row is an episode under a mask, "
        f"in micro-batches of {options.micro_batch}; the kit's turns are rows that share what they have in common. "
        "Tokens, rewards, loss and gradient norm are equal, or this stops."
    )
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        order = ARMS if number % 2 == 0 else ARMS[::-1]
        wait_until_quiet(60.0)
        made = {arm: measure(arm, options) for arm in order}
        for arm in ARMS[1:]:
            check_same(made["trl"], made[arm], arm)
        for found in made.values():
            found["episode_tokens"] = sum(map(len, found.pop("episodes")))
        rounds.append(made)
        print(json.dumps(made), flush=True)
    ratios = {
        arm: {
            part: spread([r["trl"]["seconds"][part] / r[arm]["seconds"][part] for r in rounds])
            for part in ("step", "sampling", "rest")
        }
        for arm in ARMS[1:]
    }
    shape = {"prompts": PROMPTS, "group": GROUP, "turns": TURNS, "examples": options.examples}
    command = f"python -m benchmarks.tool_loop --rounds {options.rounds} --examples {options.examples}"
    result = origin(command, "torch", "transformers", "trl") | {
        "weights": WEIGHTS[MODEL],
        **shape,
        "threads": 2,
    }
    name = "tool_loop_cpu" if options.examples else "tool_loop_cpu_no_example"
    path = save(RESULTS, name, result | {"times_faster_than_trl": ratios, "rounds": rounds})
    for arm, parts in ratios.items():
        print(
            arm,
            *(f"{part}: {found['median']:.1f} times faster" for part, found in parts.items()),
            sep=", ",
        )
    print(path)


if __name__ == "__main__":
    main()
