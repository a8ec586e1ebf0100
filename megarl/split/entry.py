"""Entry point of `megarl train` with launch.topology=split: starts the Ray cluster, runs the
controller, and records the exit code.
"""

import signal
import time
from collections.abc import Sequence

from megarl.config.launch import fallbacks, fleet_of
from megarl.config.rollout import check_cpu_engine
from megarl.config.run_dir import prepare_run_dir
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.platform.env import count_gpus
from megarl.processes.exit_codes import STOPPED, TERMINATED, CurrentPhase, Failure, failure_of, say
from megarl.processes.spawn import lock_run_dir, report_end
from megarl.split.ray_cluster import ROOM_S, NoRoom, open_cluster


def run_split(config: Config) -> int:
    """Runs stage rl in the split topology, reports a failure, and returns the exit code."""
    folder = config.run_dir
    phase = CurrentPhase()
    failure = None
    layouts = [config, *fallbacks(config)]
    with lock_run_dir(folder):
        prepare_run_dir(config, "train")
        started = time.time()
        try:
            config = _first_with_room(layouts, phase)
        except KeyboardInterrupt:
            failure = Failure(-1, STOPPED, "stopped")
        except SystemExit:  # raised by Ray's SIGTERM handler, until ours is installed
            failure = Failure(-1, TERMINATED, "stopped by SIGTERM")
        except BaseException as error:  # noqa: BLE001 (every failure becomes an exit code)
            failure = getattr(error, "failure", None) or failure_of(
                error, -1, phase=phase.name, run_dir=folder
            )
        return report_end(folder, failure, started, fleet_of(config).world)


def _first_with_room(layouts: Sequence[Config], phase: CurrentPhase) -> Config:
    """Runs with the first layout that fits the cluster; returns that layout's config.

    If a node is lost during the run, continues with the next layout. Raises the first NoRoom if no
    layout fits.
    """
    first = None
    for number, config in enumerate(layouts):
        try:
            _run(config, phase, ROOM_S if first else config.launch.timeout_s)
            return config
        except NoRoom as error:
            first = first or error
            if number < len(layouts) - 1:
                say(f"{error}; goes on in launch.fallback_layouts[{number}]")
    assert first
    raise first


def _run(config: Config, phase: CurrentPhase, room_s: float) -> None:
    fleet = fleet_of(config)
    with open_cluster(config, fleet, gpus=count_gpus(), room_s=room_s) as cluster:
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(phase, "is_stopping", True))
        if not cluster.has_gpus:
            check_cpu_engine(config, model_shape(config))
        # imported only after Ray has started, because it takes seconds
        from megarl.split.controller import train_split

        train_split(config, cluster, fleet, phase)
