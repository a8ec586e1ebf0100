"""Plans the device memory of a run, and finds changes with which a config fits. No torch.

Config, gpu --plan_memory--> MemoryPlan --as_json | describe_memory--> `megarl plan CONFIG`
                                        --check_memory--> ValueError before a run starts
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.config.launch import smallest_trainer
from megarl.config.load import changed
from megarl.config.model import check_model
from megarl.config.rollout import check_engine_layout
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.weights.plan.memory_phases import PHASES, MemoryPlan, memory_by_phase
from megarl.weights.plan.memory_sizes import GPUS, Gpu

MAX_CHANGES = 24
MAX_LOCAL = 8  # processes without launch.gpu
OFFLOAD = ("gradients", "optimizer", "weights")
SHARES = (0.7, 0.8, 0.88, 0.92)  # of rollout.gpu_memory_utilization
Changes = Mapping[str, Any]  # dotted key -> value


def plan_memory(config: Config, *, gpu: str | Gpu = "h100") -> MemoryPlan:
    """Returns the plan for a GPU of GPUS. Its problems have a remedy with which it has none.

    Raises ValueError if the sizes of the config contradict each other or the model is not
    supported, FileNotFoundError if there is no model.
    """
    device = GPUS[gpu] if isinstance(gpu, str) else gpu
    plan = memory_by_phase(config, device)
    if not plan.problems:
        return plan
    remedy = tuple(f"{key}={_text(value)}" for key, value in _remedy(config, plan).items())
    return replace(plan, problems=tuple(replace(x, remedy=remedy) for x in plan.problems))


def check_memory(config: Config, world: int, gpu: str) -> str:
    """Returns what is planned for launch.gpu, or else for `gpu`, the name of the GPU here, as a
    line of text. `world`: the number of trainer ranks.

    Raises ValueError for the worst phase if the config does not fit, and if a config of more than 8
    processes does not set launch.gpu.
    """
    names = [name for name in GPUS if name == config.launch.gpu]
    if not names and world > MAX_LOCAL:
        raise ValueError(
            f"{world} processes (launch.processes) need launch.gpu, for which memory is checked "
            f"before a rank starts; set it to {', '.join(GPUS)}"
        )
    names += [name for name in GPUS if name in gpu.lower()]
    if not names:
        reason = "no GPU here" if not gpu else f"the memory of {gpu} is not known"
        return f"not checked: {reason}, and launch.gpu is null"
    plan = plan_memory(changed(config, "launch", processes=world), gpu=names[0])
    if plan.problems:
        raise ValueError(str(max(plan.problems, key=lambda x: x.bytes - x.limit)))
    return _summary(plan)


def _summary(plan: MemoryPlan) -> str:
    side, phase, peak = plan.largest
    return (
        f"at most {peak.peak_bytes / 1e9:.1f} of the {plan.gpu.bytes / 1e9:.1f} GB of each "
        f"{plan.gpu.name.upper()} ({side} rank {peak.rank}, {phase})"
    )


def describe_memory(plan: MemoryPlan) -> str:
    """Returns the plan as text for the terminal: GB of the fullest rank, by phase."""
    lines = [f"memory: {_summary(plan)}; GB of the fullest rank, by phase"]
    for side, peaks in (("trainer", plan.trainer), ("engine", plan.engine)):
        phases = [phase for phase in PHASES.split() if phase in peaks]
        for phase in phases:
            components = {**peaks[phase].components, "total": peaks[phase].peak_bytes}
            if phase == phases[0]:
                lines.append(f" {side:8}{''.join(f'{name:>13}' for name in components)}   rank")
            sizes = "".join(f"{size / 1e9:13.1f}" for size in components.values())
            lines.append(f"  {phase:8}{sizes}{peaks[phase].rank:7}")
    if plan.kv:
        lines.append(
            " KV cache  {tokens_per_gpu:,} tokens per GPU, {sequences:,} sequences of "
            "{sequence_tokens:,} at once, {waves} waves a step".format(**plan.kv)
        )
    host = ", ".join(f"{name} {size / 1e9:,.0f}" for name, size in plan.host.items() if size)
    lines.append(f" host      {sum(plan.host.values()) / 1e9:,.0f} GB per node ({host or 'none'})")
    return "\n".join([*lines, *map(str, plan.problems)])


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value)


def _remedy(config: Config, plan: MemoryPlan) -> Changes:
    """Returns changes with which nothing exceeds its limit; {} if none are found.

    Takes the first step that suffices, or else the first that helps, and repeats; then drops what
    is not needed.
    """
    changes = {}
    while plan.problems:
        best = None
        for step in _steps(_apply(config, changes), plan):
            candidate = _plan_with(config, {**changes, **step}, plan.gpu)
            if candidate is None or candidate.excess >= plan.excess:
                continue
            if best is None or not candidate.problems:
                best = (step, candidate)
            if not candidate.problems:
                break
        if best is None or len(changes) > MAX_CHANGES:
            return {}
        changes |= best[0]
        plan = best[1]
    for key in list(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        candidate = _plan_with(config, fewer, plan.gpu)
        if candidate is not None and not candidate.problems:
            changes = fewer
    return changes


def _apply(config: Config, changes: Changes) -> Config:
    sections = defaultdict(dict)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    for section, values in sections.items():
        config = changed(config, section, **values)
    return config


def _plan_with(config: Config, changes: Changes, gpu: Gpu) -> MemoryPlan | None:
    """Returns the plan with these changes; None if they are not allowed."""
    try:
        config = _apply(config, changes)
        shape = model_shape(config)
        check_model(config, shape)
        check_engine_layout(config, shape)
        return memory_by_phase(config, gpu)
    except ValueError:
        return None


def _steps(config: Config, plan: MemoryPlan) -> Iterator[Changes]:
    """Yields single changes, the cheapest first: of what moves, of tokens, then of layouts."""
    train = config.train
    rollout = config.rollout
    is_shared = bool(plan.engine) and not config.launch.is_split
    if is_shared and rollout.sleep_level < 2:
        yield {"rollout.sleep_level": 2}
    if is_shared:
        offload = OFFLOAD
        if train.optimizer_cpu_offload:
            offload = ("gradients", "weights")
        for count in range(1, len(offload) + 1):
            yield {"train.offload": offload[:count]}
    if any(problem.side == "engine" for problem in plan.problems):
        yield from _engine_steps(config)
    yield {"train.recompute": "full"}
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    for name in ("max_tokens_per_logprob_batch", "max_tokens_per_microbatch"):
        tokens = getattr(train, name)
        if tokens and tokens > longest:
            yield {f"train.{name}": max(longest, tokens // 2)}
    sizes = config.parallel
    for axis in ("tensor", "context", "expert", "pipeline"):
        yield from _grown(config, {f"parallel.{axis}": 2 * getattr(sizes, axis)})
    yield from _grown(config, {})
    yield {"sync.round_bytes": config.sync.round_bytes // 2}
    yield from _engine_steps(config)


def _engine_steps(config: Config) -> Iterator[Changes]:
    rollout = config.rollout
    for share in SHARES:
        if share > rollout.gpu_memory_utilization:
            yield {"rollout.gpu_memory_utilization": share}
    ranks = 2 * rollout.ranks_per_replica
    if rollout.data == 1:
        yield from _grown(config, {"rollout.tensor": ranks})
    shared = {"rollout.data": ranks // rollout.ranks_per_sampler, "rollout.expert": ranks}
    yield from _grown(config, shared)


def _grown(config: Config, step: Changes) -> Iterator[Changes]:
    """Yields a step on as many GPUs as before, and on twice as many or more."""
    if step:
        yield step
    if config.launch.processes:
        larger = _apply(config, step)
        unit = smallest_trainer(larger)
        yield {**step, "launch.processes": -(-2 * config.launch.processes // unit) * unit}
