"""A tiny run with trackers, and what their own readers find: python tracked_run.py FOLDER tracker,tracker.

Prints, as the last line, JSON: what stands in each tracker after a stopped run, and after steps were done again.
"""

import html
import json
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
from loop_runs import make, task

import grpo_kit as kit
from grpo_kit.loop.protocols import Hook
from grpo_kit.more.bridges import trackers
from grpo_kit.trainer.held_out import HeldOutHook
from grpo_kit.trainer.watch_run import WatchRun

WANDB_BLOCK, WANDB_HEADER = 32768, 7
STEPS = 6


class StopOnce(Hook):
    """Stops after step 2, before the trackers are called for it."""

    stopped = False

    def after_step(self, trainer, row, batch):
        if trainer.step == 2 and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt


def trained(folder, names):
    """6 steps at a rate that breaks the model: a red flag; held-out rows measured every second step."""
    hooks = [HeldOutHook(kit.HeldOut(task(), rows=4, every=2)), WatchRun(live=None), StopOnce()]
    hooks += map(trackers.by_name, names)
    return make(
        folder, steps=STEPS, learning_rate=0.5, save_steps=4, save_total_limit=9, hooks=hooks
    )


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    tags = found.Tags()

    def texts(tag):
        for event in found.Tensors(f"{tag}/text_summary"):
            yield event.step, tensor_util.make_ndarray(event.tensor_proto).item().decode()

    tables = {}
    for step, text in texts("completions"):
        names, _, *rows = [
            [html.unescape(cell.strip()) for cell in line.strip("|").split("|")]
            for line in text.split("\n")
        ]
        tables[step] = [dict(zip(names, row, strict=True)) for row in rows]
    alerts = [tag.removesuffix("/text_summary") for tag in tags["tensors"]]
    alerts = [tag for tag in alerts if tag == "change" or tag.startswith("red flag")]
    return {
        "numbers": [
            [each.step, tag, each.value]
            for tag in tags["scalars"]
            for each in found.Scalars(tag)
        ],
        "tables": tables,
        "alerts": [
            [step, tag, html.unescape(text)] for tag in alerts for step, text in texts(tag)
        ],
        "config": json.loads(html.unescape(next(texts("config"))[1])),
    }


def of_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    kept = json.loads((folder / "trackers.json").read_text())["trackio"]
    project, run = kept["project"], kept["run"]
    logs = SQLiteStorage.get_logs(project, run)
    return {
        "runs": SQLiteStorage.get_runs(project),
        "numbers": [
            [log["step"], name, value]
            for log in logs
            for name, value in log.items()
            if isinstance(value, (int, float)) and name != "step"
        ],
        "tables": {
            log["step"]: log["completions"]["_value"]
            for log in logs
            if isinstance(log.get("completions"), dict)
        },
        "alerts": [
            [a["step"], a["title"], a["text"]] for a in SQLiteStorage.get_alerts(project, run)
        ],
        "config": SQLiteStorage.get_run_config(project, run),
    }


def wandb_records(path):
    """The records of a .wandb file: a LevelDB log of wandb's protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, whole = path.read_bytes(), WANDB_HEADER, b""
    while at + 7 <= len(raw):
        left = WANDB_BLOCK - at % WANDB_BLOCK
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        if not kind:
            break
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def of_wandb(folder):
    numbers, tables, alerts, config, ends = [], {}, [], {}, []
    every = sorted((folder / "wandb").glob("offline-run-*"))
    for run in every:
        for record in wandb_records(next(run.glob("*.wandb"))):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                item = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                step = item.get("train/global_step")
                numbers += [
                    [step, name, value]
                    for name, value in item.items()
                    if isinstance(value, (int, float))
                    and not name.startswith(("_", "completions/"))
                    and name != "train/global_step"
                ]
                path = item.get("completions/path") or (item.get("completions") or {}).get(
                    "path"
                )
                if path:
                    table = json.loads((run / "files" / path).read_text())
                    tables[step] = [
                        dict(zip(table["columns"], row, strict=True)) for row in table["data"]
                    ]
            elif kind == "alert":
                at = int(record.alert.text.removeprefix("Step ").partition(":")[0])
                alerts.append([at, record.alert.title, record.alert.text])
            elif kind in ("run", "config"):
                said = record.run.config if kind == "run" else record.config
                config |= {
                    i.key or i.nested_key[0]: json.loads(i.value_json) for i in said.update
                }
            elif kind == "exit":
                ends.append(record.exit.exit_code)
    return {
        "runs": len({run.name.split("-")[3] for run in every}), "numbers": numbers, "tables": tables,
        "alerts": alerts, "config": config, "ends": ends,
    }  # fmt: skip


READERS = {"tensorboard": of_tensorboard, "trackio": of_trackio, "wandb": of_wandb}


def main(folder, names):
    # it was imported before this process had its environment
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    trainer = trained(folder, names)
    try:
        trainer.train()
    except kit.Stopped as stop:
        assert stop.step == 2
    trainer.change(learning_rate=0.4)
    trainer.train()
    once = {name: READERS[name](folder) for name in names}
    shutil.copy(folder / "metrics.jsonl", folder.parent / "once.jsonl")
    for path in folder.glob("checkpoint-*"):  # as after a kill in a later step
        if path.name != "checkpoint-4":
            shutil.rmtree(path)
    again = trained(folder, names)
    again.train(resume=True)
    print(
        json.dumps(
            {"once": once, "again": {name: READERS[name](folder) for name in names}},
            default=str,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
