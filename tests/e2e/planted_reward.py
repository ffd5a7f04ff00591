"""A reward function with faults: each file in the folder `planted` makes one call fail in the way that it names."""

import os
import time
from pathlib import Path

PLANTED, TAKEN, PACE = (Path(__file__).parent / name for name in ("planted", "taken", "pace"))
SLOW_S = 2.0


def score(data_source, solution_str, ground_truth, extra_info=None):
    for path in sorted(PLANTED.iterdir()):
        taken = TAKEN / path.name
        mine = taken.with_suffix(f".{os.getpid()}")
        try:
            path.rename(mine)
        except FileNotFoundError:  # another process was faster
            continue
        mine.write_text(str(os.getpid()))
        mine.rename(taken)
        fail(path.name.partition("-")[0])
    time.sleep(float(PACE.read_text()))
    return float(len(solution_str) % 3)


def fail(how: str) -> None:
    if how == "raise":
        raise KeyError("planted")
    if how == "exit":
        os._exit(3)
    time.sleep({"hang": 1e6, "slow": SLOW_S}[how])
