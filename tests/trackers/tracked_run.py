"""A tiny run that reports to trackers, and what their own readers find: python tracked_run.py FOLDER tracker,tracker.

Prints, as the last line, JSON: how often the run was begun in each tracker, and what stands there.
"""

import html
import json
import sys
from pathlib import Path

from tiny_run import data, interrupted_once, letters, make

from grpo_kit.models import load_policy

WANDB_BLOCK, WANDB_HEADER = 32768, 7


def half(completions, **columns):
    return [1 - score for score in letters(completions)]


def trained(folder, names, **overrides):
    """4 steps of bfloat16 weights whose updates are rounded away: a red flag; evaluated, changed, stopped, resumed."""
    model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    return make(
        "kit", folder, model=model, rewards=[letters, half], report_to=names, optim="sgd", learning_rate=1e-12,
        max_steps=4, save_strategy="steps", save_steps=2, eval_dataset=data(2), eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4, log_completions=True, **overrides,
    )  # fmt: skip


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    tags = found.Tags()
    texts = {
        tag: [(event.step, event.tensor_proto) for event in found.Tensors(tag)] for tag in tags["tensors"]
    }
    from tensorboard.util import tensor_util

    def cells(proto):
        return [
            html.unescape(cell.decode() if isinstance(cell, bytes) else cell)
            for cell in tensor_util.make_ndarray(proto).reshape(-1).tolist()
        ]

    tables = {}
    for step, proto in texts.get("completions", []):
        width = tensor_util.make_ndarray(proto).shape[1]
        flat = cells(proto)
        rows = [flat[i : i + width] for i in range(0, len(flat), width)]
        tables[step] = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    return {
        "numbers": [
            [event.step, tag, event.value] for tag in tags["scalars"] for event in found.Scalars(tag)
        ],
        "tables": tables,
        "alerts": [
            [step, tag, cells(proto)[0]]
            for tag, found in texts.items()
            if tag == "change" or tag.startswith("red flag")
            for step, proto in found
        ],
        "config": json.loads(cells(texts["config"][-1][1])[0].strip("`\n")),
    }


def of_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    kept = json.loads((folder / "trackers.json").read_text())["trackio"]
    project, run = kept["project"], kept["name"]
    logs = SQLiteStorage.get_logs(project, run)
    tables = {
        log["step"]: log["completions"]["_value"] for log in logs if isinstance(log.get("completions"), dict)
    }
    return {
        "runs": SQLiteStorage.get_runs(project),
        "numbers": [
            [log["step"], name, value]
            for log in logs
            for name, value in log.items()
            if isinstance(value, (int, float)) and name != "step"
        ],
        "tables": tables,
        "alerts": [[a["step"], a["title"], a["text"]] for a in SQLiteStorage.get_alerts(project, run)],
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
    kept = json.loads((folder / "trackers.json").read_text())["wandb"]
    numbers, tables, alerts, config, ends = [], {}, [], {}, []
    every = sorted((folder / "wandb").glob("offline-run-*"))
    for run in (run for run in every if run.name.endswith(kept["id"])):
        for record in wandb_records(next(run.glob("*.wandb"))):
            if record.WhichOneof("record_type") == "history":
                item = {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item
                }
                step = item.get("train/global_step")
                numbers += [
                    [step, name, value]
                    for name, value in item.items()
                    if isinstance(value, (int, float))
                    and not name.startswith(("_", "completions/"))
                    and name != "train/global_step"
                ]
                path = item.get("completions/path") or (item.get("completions") or {}).get("path")
                if path:
                    table = json.loads((run / "files" / path).read_text())
                    tables[step] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            elif record.WhichOneof("record_type") == "alert":
                at = int(record.alert.text.removeprefix("Step ").partition(":")[0])
                alerts.append([at, record.alert.title, record.alert.text])
            elif record.WhichOneof("record_type") in ("run", "config"):
                said = record.run.config if record.WhichOneof("record_type") == "run" else record.config
                config |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in said.update}
            elif record.WhichOneof("record_type") == "exit":
                ends.append(record.exit.exit_code)
    return {
        "runs": len({run.name.split("-")[-1] for run in every}), "numbers": numbers, "tables": tables,
        "alerts": alerts, "config": config, "ends": ends,
    }  # fmt: skip


READERS = {"tensorboard": of_tensorboard, "trackio": of_trackio, "wandb": of_wandb}


def main(folder, names):
    trainer = trained(folder, names)
    pressed = interrupted_once(trainer, "rollout", at_step=2)
    trainer.change(learning_rate=2e-12)
    trainer.train(on_stop="return")
    assert pressed and trainer.interrupted and trainer.state.global_step == 2
    trainer.train()
    once = {name: READERS[name](folder) for name in names}
    (folder.parent / "once.csv").write_text((folder / "metrics.csv").read_text())
    trained(folder, names).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    print(json.dumps({"once": once, "again": {name: READERS[name](folder) for name in names}}, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
