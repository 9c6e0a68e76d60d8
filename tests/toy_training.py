"""A training script that logs like the real ones, but trains nothing: for the tests of the harness."""

import os
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rounds, step = int(options["--total-timesteps"]) // 2048, 0
print("pid", os.getpid(), os.environ["OMP_NUM_THREADS"], flush=True)
writer = EventFileWriter(f"runs/toy__{options['--seed']}")


def log(**values):
    for name, value in values.items():
        summary = Summary(value=[Summary.Value(tag=name.replace("__", "/"), simple_value=value)])
        writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))


for k in range(rounds + 1):
    print(f"round={k}, eval_episodic_return={k}")
    log(eval__episodic_return=10 * k + int(options["--seed"]))
    if k == 1 and options["--then"] == "fail":
        raise ValueError("the toy breaks")
    while k == 1 and options["--then"] == "wait" and not Path(options["--for"]).exists():
        print("waiting")
        time.sleep(0.05)
    if k == 1 and options["--then"] == "end":
        break
    if k < rounds:
        step += 2048
        scored = {"influence__records_kept": 2000 - k, "influence__negative_fraction": 0.25} if "--scored" in options else {}
        log(charts__round=k, time__rollout=1, time__scoring=0.5, time__update=2, **scored)
writer.close()
