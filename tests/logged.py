"""Reads back what the loggers W&B and MLflow have of runs, by their own packages."""

import importlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Logged:
    """What a logger has of a run.

    Attributes:
        name, group: as shown.
        config: path -> value.
        rows: each row in the order in which it was logged, with its step.
        summary: the last summary, or the tags.
        status: how it ended.
        parts: how many processes logged it, as far as known.
    """

    name: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    status: Any = None
    parts: int = 0


def wandb_runs(folder: Path) -> dict[str, Logged]:
    """Returns the offline runs in FOLDER/wandb by their ids; a run may have several files."""
    found: dict[str, Logged] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run = found.setdefault(file.stem.removeprefix("run-"), Logged())
        run.parts += 1
        for record in _records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert record.run.run_id == file.stem.removeprefix("run-")
                run.name, run.group = record.run.display_name, record.run.run_group
                items = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                run.config |= {k: x for k, x in items.items() if k and k != "_wandb"}
            elif kind == "history":
                row = {_key(each): json.loads(each.value_json) for each in record.history.item}
                assert row["_step"] == record.history.step.num
                row = {k: x for k, x in row.items() if not k.startswith("_")}
                run.rows.append({"step": record.history.step.num, **row})
            elif kind == "summary":
                items = {_key(each): json.loads(each.value_json) for each in record.summary.update}
                run.summary |= items
            elif kind == "exit":
                run.status = record.exit.exit_code
    return found


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _records(file: Path) -> Iterator[Any]:
    """Yields wandb's own messages; the checksum of each piece shows that it was found rightly."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data = file.read_bytes()
    at, record = 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        if len(data) < at + 7:
            return  # still written, or torn by a kill, in or before a header
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7 : at + 7 + length]
        if len(piece) < length:
            return  # in a piece
        assert zlib.crc32(data[at + 6 : at + 7 + length]) == checksum
        at += 7 + length
        record += piece
        if kind in (1, 4):  # whole, or its last piece
            message = messages.Record()
            message.ParseFromString(record)
            yield message
            record = b""


def mlflow_runs(uri: str) -> dict[str, Logged]:
    """Returns the runs of a tracking store by the id that Lockstep gave them."""
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    found: dict[str, Logged] = {}
    for each in client.search_runs(experiments):
        tags = each.data.tags
        assert tags["lockstep.id"] not in found, "a run is there twice"
        run = found[tags["lockstep.id"]] = Logged(
            each.info.run_name,
            tags.get("lockstep.group", ""),
            dict(each.data.params),
            summary=each.data.metrics | dict(tags),
            status=each.info.status,
        )
        rows: dict[int, dict[str, Any]] = {}
        for name in each.data.metrics:
            for metric in client.get_metric_history(each.info.run_id, name):
                row = rows.setdefault(metric.step, {"step": metric.step})
                assert name == "step" or name not in row, f"{name} of {metric.step} is there twice"
                row[name] = metric.value
        run.rows = [rows[step] for step in sorted(rows)]
    return found
