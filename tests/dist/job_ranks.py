"""One rank of a job that samples until told to stop: FOLDER/stop. Tells what it drew in FOLDER/<job>_<rank>.json.

python job_ranks.py FOLDER JOB
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from sync_ranks import TP2, Launch


def main(folder: Path, job: str) -> None:
    dist.init_process_group("gloo")
    launch = Launch(folder / job, "qwen3", 2, job)
    launch.connect(TP2).publish(version=0)
    drawn = None
    deadline = time.monotonic() + 600  # nobody may be left to say stop
    while not (folder / "stop").exists() and time.monotonic() < deadline:
        now = [(sample.tokens.tolist(), sample.rollout_logprobs.tolist()) for sample in launch.sample(0)]
        assert drawn in (None, now), "another job's activations came through"
        if drawn is None:
            partial = folder / f"{job}_{dist.get_rank()}.part"
            partial.write_text(json.dumps(now))
            partial.rename(partial.with_suffix(".json"))
        drawn = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
