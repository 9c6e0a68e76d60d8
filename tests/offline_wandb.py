"""Read what an offline W&B run (offline-run-*/run-*.wandb) holds: its history rows and its config.

The file is a LevelDB log of protobuf records: after a 7-byte file header come blocks of 32 KiB, each of pieces with a 7-byte
header (checksum, length, kind); a record that does not fit into its block is cut into a first, middle and last piece.
"""

import json
import struct

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def records(path):
    """Yield the records of the file, parsed."""
    with open(path, "rb") as file:
        data = file.read()
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is not a W&B run file")
    position, whole = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER]) if left >= HEADER else (0, 0, 0)
        if kind == 0:  # the rest of the block is padding
            position += left
            continue
        position += HEADER
        piece = data[position : position + length]
        position += length
        whole = piece if kind in (FULL, FIRST) else whole + piece
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record


def history(path):
    """The rows that were logged, a dict of values each."""
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def run(path):
    """The record that begins the run: its id, group, ..."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def config(path):
    """The run's config."""
    updates = [record.run.config.update for record in records(path) if record.WhichOneof("record_type") == "run"]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for update in updates for item in update}
