"""What each rank is doing, and which one is late. No torch.

    rank: a thread --StackSampler.beat--> "number RankState" --slot or store--> observer
    observer --find_late--> the rank to name

A rank waits if its main thread is in a communication call. It is stuck if it does not wait, and for
STALL_S has neither moved nor computed. So the ranks' collectives, which differ between pipeline
stages, need no comparison. (torch's flight recorder is of no use: it keeps gloo's finished
collectives open, and reading it takes 60 ms.)
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.processes.exit_codes import CurrentPhase

STALL_S = 30.0  # in one place, until a rank counts as waiting or stuck
BUSY_CPU = 0.05  # of a core: who uses more is computing
WAITS = re.compile(
    r"/(torch|vllm)/distributed/"
    r"|/(p2p_communication|param_and_grad_buffer|transports/collective)\.py$"
)
WRAPPERS = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/c10d_logger.py")
SHOWN_FRAMES = 4
HOST = socket.gethostname()


class RankState(NamedTuple):
    """One sample of a rank."""

    pid: int
    host: str
    phase: str
    operation: str  # an engine step, or empty
    is_waiting: bool  # for other ranks
    # elsewhere: a reward waits for other programs, start-up for disks and compilers
    is_limited: bool
    seconds: float  # since anything of it changed
    cpu_s: float  # used meanwhile, by all threads
    stack: str  # innermost frames

    @property
    def is_stuck(self) -> bool:
        return (
            not self.is_waiting and self.seconds >= STALL_S and self.cpu_s < self.seconds * BUSY_CPU
        )

    def __str__(self) -> str:
        return f"{self.phase}{self.operation and ', '}{self.operation}, at {self.stack}"


@dataclass
class StackSampler:
    """Samples the main thread of this process, from another thread."""

    phase: CurrentPhase
    _place: Any = None
    _began: float = 0.0
    _cpu: float = 0.0
    _beats: int = 0

    def beat(self) -> str:
        """Returns the number of beats and, unless sampling fails, the state of this one as JSON."""
        self._beats += 1
        state = ""
        with suppress(Exception):  # the beats, by which a rank lives, go on
            state = json.dumps(self.sample())
        return f"{self._beats} {state}"

    def sample(self) -> RankState:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [
            (f.f_code.co_filename, line, f.f_code.co_name)
            for f, line in traceback.walk_stack(main)
            if not f.f_code.co_filename.endswith(WRAPPERS)
        ]
        phase = self.phase.name
        steps = self.phase.engine_steps
        if (place := (frames, phase, steps)) != self._place:
            self._place = place
            self._began = time.monotonic()
            self._cpu = time.process_time()
        shown = [
            f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})"
            for file, line, name in frames[:SHOWN_FRAMES]
        ]
        return RankState(
            os.getpid(),
            HOST,
            phase,
            f"engine step {steps}" * (phase == "rollout"),
            bool(frames and WAITS.search(frames[0][0])),
            phase == "start-up" or any("/megarl/rewards/" in file for file, _, _ in frames),
            time.monotonic() - self._began,
            time.process_time() - self._cpu,
            " < ".join(shown),
        )


def find_late(states: Mapping[int, RankState]) -> tuple[list[int], list[int]]:
    """Returns (late ranks, ranks that wait).

    Stuck ranks are late. If none is stuck but some wait, the ranks that do not wait are late,
    though only slow. If all wait, those are late that wait in another phase or operation than most:
    they left out or added a collective.
    """
    waiting = [
        rank for rank, state in states.items() if state.is_waiting and state.seconds >= STALL_S
    ]
    if stuck := [
        rank
        for rank, state in states.items()
        if state.is_stuck and (waiting or not state.is_limited)
    ]:
        return stuck, waiting
    if len(waiting) < len(states):
        return [rank for rank, state in states.items() if waiting and not state.is_waiting], waiting
    places = {rank: (state.phase, state.operation) for rank, state in states.items()}
    usual = [place for place, _ in Counter(places.values()).most_common(1)]
    return [rank for rank, place in places.items() if place not in usual], waiting
