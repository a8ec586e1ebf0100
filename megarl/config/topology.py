"""Checks of launch.topology: what the split one does not do is refused, not ignored."""

from __future__ import annotations

from operator import attrgetter

from megarl.config.schema import Config
from megarl.models.shape import ModelShape
from megarl.platform.env import Env

SPLIT_ONLY = (
    "rollout.replicas", "rollout.max_staleness", "rollout.update_in_flight", "launch.dashboard", "launch.max_restarts",
    "launch.fallback_layouts",
)  # fmt: skip


def fallbacks(config: Config) -> list[Config]:
    """The configs of launch.fallback_layouts, in their order."""
    configs = list[Config]()
    for layout in config.launch.fallback_layouts:
        launch = config.launch.model_copy(update={"processes": layout.processes, "fallback_layouts": ()})
        configs.append(config.model_copy(update={"launch": launch, "parallel": layout.parallel}))
    return configs


def check_topology(config: Config, env: Env, shape: ModelShape, command: str) -> None:
    """Raises ValueError with a one-line message."""
    launch, rollout, train = config.launch, config.rollout, config.train
    if launch.topology == "colocated":
        for key in SPLIT_ONLY:
            if (value := attrgetter(key)(config)) != attrgetter(key)(Config()):
                raise ValueError(f"{key}={value} is for launch.topology=split; remove it, or set the topology")
        return
    remedy = "set launch.topology=colocated"
    if env.has_launcher:
        raise ValueError(f"launch.topology=split is started by Ray, not by torchrun; run `megarl train`, or {remedy}")
    if command != "train" or config.stage != "rl":
        what = f"`megarl {command}`" if command != "train" else f"stage={config.stage}"
        raise ValueError(f"launch.topology=split is for `megarl train` with stage: rl, not for {what}; {remedy}")
    if shape.bridge is not None:
        raise ValueError(f"launch.topology=split does not support {shape.family}, which has no table; {remedy}")
    if any(reward.name == "model" for reward in config.rewards):
        raise ValueError(
            f"rewards: name='model' scores on the trainer's ranks, which launch.topology=split does not; {remedy}, or "
            "serve the model (`megarl serve-reward`) and give its URL"
        )
    for key, value, off in (
        ("rollout.quantization", rollout.quantization, "none"),
        ("rollout.router_replay", rollout.router_replay, "none"),
    ):
        if value != off:
            raise ValueError(
                f"{key}={value} is not available with launch.topology=split; leave it at {off}, or {remedy}"
            )
    for key, value in {"train.offload": list(train.offload), "rollout.sleep_level": rollout.sleep_level}.items():
        if value:
            raise ValueError(
                f"{key}={value} frees a GPU for the other side, but launch.topology=split shares none; unset it"
            )
