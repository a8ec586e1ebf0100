"""Computes the device memory of a run by phase, from its config and the model's config.json.

    Config, Gpu --memory_by_phase--> MemoryPlan (without remedies)

Each phase has moments, such as the backward pass and the optimizer step of an update; the fullest
moment of the fullest rank counts. Ranks of a pipeline stage have the same sizes. The phases are
those of the metrics memory/NAME/peak_gb, and the probe of the first sync. Weights, gradients and
optimizer state are exact (Megatron's buffers with their padding); the rest is an estimate
(config/device_memory.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.device_memory import FRAGMENTATION, Activations, activations
from megarl.config.launch import fleet_of
from megarl.config.schema import Config
from megarl.config.validate import model_shape
from megarl.layout import Fleet, Layout
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.weights.plan.memory_sizes import EngineSizes, Gpu, State, engine_sizes, training_state

# in the order of a run
PHASES = """
    startup sync probe staging rollout exchange train logprobs update save
"""
MESSAGES = 3  # rounds' messages that a rank has at once: sent, received, and the next packed
STATE = ("weights", "gradients", "optimizer")

Moment = Mapping[str, int]  # component -> bytes
Moments = Iterator[tuple[str, Moment]]  # phase, components


@dataclass(frozen=True)
class PhasePeak:
    """The fullest moment of a phase on the fullest rank."""

    rank: int
    components: Moment

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


Peaks = dict[str, PhasePeak]  # phase -> peak


@dataclass(frozen=True)
class MemoryProblem:
    """A phase that does not fit."""

    side: str  # "trainer" or "engine"
    phase: str
    component: str  # the largest
    bytes: int
    limit: int
    remedy: Sequence[str] = ()  # overrides with which the config fits; empty: none was found

    def __str__(self) -> str:
        remedy = "no change of layout, recompute or offload was found that fits; use more GPUs"
        if self.remedy:
            remedy = f"set {' '.join(self.remedy)}"
        return (
            f"out of memory, {self.side}, {self.phase}: {self.bytes / 1e9:.1f} GB of "
            f"{self.limit / 1e9:.1f}, most of it {self.component}; {remedy}"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by phase, of the fullest rank of trainer and engine, and of a host."""

    gpu: Gpu
    trainer: Peaks
    engine: Peaks  # without the trainer's part of a shared GPU
    kv: Mapping[str, int]
    host: Moment  # per node
    problems: Sequence[MemoryProblem] = ()

    @property
    def excess(self) -> int:
        return sum(problem.bytes - problem.limit for problem in self.problems)

    @property
    def largest(self) -> tuple[str, str, PhasePeak]:
        """The side, phase and peak of the fullest moment."""
        peaks = [("trainer", *item) for item in self.trainer.items()]
        peaks += [("engine", *item) for item in self.engine.items()]
        return max(peaks, key=lambda item: item[2].peak_bytes)

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `megarl plan CONFIG --json` prints."""
        side, phase, peak = self.largest
        return {
            "gpu": self.gpu.name,
            "gpu_bytes": self.gpu.bytes,
            "fits": not self.problems,
            "largest": {"side": side, "rank": peak.rank, "phase": phase},
            "trainer": {"phases": _phases_json(self.trainer)},
            "engine": {"phases": _phases_json(self.engine), "kv": self.kv},
            "host": {"bytes_per_node": sum(self.host.values()), "components": self.host},
            "problems": [vars(problem) for problem in self.problems],
        }


def _phases_json(peaks: Peaks) -> dict[str, Any]:
    return {phase: {"peak_bytes": peak.peak_bytes, **vars(peak)} for phase, peak in peaks.items()}


def memory_by_phase(config: Config, gpu: Gpu) -> MemoryPlan:
    """Returns the plan, with problems that have no remedies yet. Raises ValueError if the sizes of
    the config contradict each other or the model is not supported, FileNotFoundError if there is
    no model."""
    shape = model_shape(config)
    fleet = fleet_of(config)
    models = [shape]
    if config.algorithm.needs_critic:
        folder = config.critic.model
        models.append(read_model(model_folder(folder)) if folder else shape)
    stage = fleet.trainers // fleet.parallel.pipeline
    layouts = [fleet.trainer_layout(rank) for rank in range(0, fleet.trainers, stage)]
    ranks = []
    for layout in layouts:
        states = [training_state(config, model, layout) for model in models]
        ranks.append(_TrainerRank(config, shape, layout, gpu, states))
    engine = None
    if config.stage_spec.needs_engine:
        used = 0
        if not fleet.is_split:
            used = max(sum(rank.at_start("").values()) for rank in ranks)
        engine = engine_sizes(config, shape, fleet, gpu, used)
    trainer = {}
    for rank in ranks:
        _keep_largest(trainer, rank.layout.rank, rank.moments(engine))
    plan = MemoryPlan(gpu, trainer, {}, {}, _host(config, fleet, ranks, engine))
    if engine:
        _keep_largest(plan.engine, fleet.first_receiver, _engine_moments(config, engine, gpu))
        plan = replace(plan, kv=_kv(config, fleet, engine))
    return replace(plan, problems=[*_problems(config, plan, engine)])


def _keep_largest(peaks: Peaks, rank: int, moments: Moments) -> None:
    for phase, components in moments:
        peak = PhasePeak(rank, components)
        if phase not in peaks or peak.peak_bytes > peaks[phase].peak_bytes:
            peaks[phase] = peak


@dataclass(frozen=True)
class _TrainerRank:
    """A trainer rank, with phases as run/phases.py and trainer/offload.py order them."""

    config: Config
    shape: ModelShape
    layout: Layout
    gpu: Gpu
    states: list[State]  # of the policy and a critic

    def moment(
        self,
        whole: str = "weights",  # the parts of the state that are on the device, beside what stays
        passes: Activations | None = None,
        *,
        engine: int = 0,
        staged: int = 0,
    ) -> Moment:
        components = {}
        for kind in STATE:
            kept = [getattr(state.kept(self.config), kind) for state in self.states]
            full = [getattr(state, kind) for state in self.states]
            components[kind] = sum(kept)
            if kind in whole:  # gradients and optimizer state of one model at a time
                missing = [a - b for a, b in zip(full, kept, strict=True)]
                components[kind] += sum(missing) if kind == "weights" else max(missing)
        components["activations"] = passes.layers if passes else 0
        components["logits"] = passes.logits if passes else 0
        components["staged"] = staged
        tensors = sum(components.values())
        beside = self.gpu.overhead("context", "trainer_nccl", "workspaces")
        beside += int(self.gpu.has_overheads * FRAGMENTATION * tensors)
        return {**components, "engine": engine, "not_tensors": beside}

    def moments(self, engine: EngineSizes | None) -> Moments:
        yield from self._startup()
        if engine is None:
            yield from self._training(0)
        elif self.config.launch.is_split:
            yield from self._training(0)
            yield "sync", self.moment(staged=2 * self.config.sync.round_bytes)
        else:
            yield from self._training(engine.resident(self.config.rollout.sleep_level))
            yield from self._shared(engine)

    def _startup(self) -> Moments:
        # a model is built and loaded, then its weights are copied into a buffer; the optimizer
        # copies them in fp32, and a checkpoint has the moments, too
        built = self.moment("weights gradients")
        weights = built["weights"] + max(state.weights for state in self.states)
        yield "startup", {**built, "optimizer": 0, "weights": weights}
        if self.config.checkpoint.resume == "never":
            yield "startup", self.at_start("weights optimizer")
        else:
            yield "startup", self.moment("weights optimizer")

    def at_start(self, whole: str, *, engine: int = 0) -> Moment:
        """Returns the components before the first step, when Adam has no moments yet."""
        moment = self.moment(whole, engine=engine)
        main = moment["optimizer"] // 3 if self.config.train.dtype == "bf16" else 0
        return {**moment, "optimizer": main}

    def _activations(self, *, updates: bool) -> Activations:
        return activations(
            self.config, self.shape, self.layout, updates=updates, kernels=self.gpu.kernels
        )

    def _training(self, engine: int) -> Moments:
        train = self.config.train
        backward = self._activations(updates=True)
        everything = "weights gradients optimizer"
        scored = self.moment(passes=self._activations(updates=False), engine=engine)
        yield "logprobs", scored
        updates = [
            self.moment("weights gradients", backward, engine=engine),
            self.moment(everything, engine=engine),
        ]
        stays = self.moment(everything, backward, engine=engine)
        is_kept = sum(stays.values()) <= self.gpu.bytes  # run/memory.py decides so
        if is_kept and train.updates_per_step * train.epochs_per_batch > 1:
            updates.append(stays)
        for update in updates:
            yield "update", update
        for moment in (scored, *updates):
            yield "train", moment
        yield "save", updates[1]  # it begins with gradients

    def _shared(self, engine: EngineSizes) -> Moments:
        """Yields the moments in which the engine samples, or is written, on the same GPU."""
        config = self.config
        sampling = self.moment("", engine=sum(engine.sampling().values()))
        yield "startup", self.at_start("", engine=sum(engine.sampling().values()))
        for phase in ("rollout", "exchange", "sync", "probe"):
            yield phase, sampling
        written = sum(engine.writing(config.rollout.sleep_level).values())
        yield "probe", self.moment(passes=self._activations(updates=False), engine=written)
        moment = self.moment(engine=written, staged=_in_flight(config, engine))
        yield from _synced(config, engine, moment, self.gpu)


def _in_flight(config: Config, engine: EngineSizes) -> int:
    """Returns the bytes of messages, and of tensors that are being written."""
    messages = MESSAGES - config.launch.is_split  # of separate ranks, each only sends or receives
    return messages * config.sync.round_bytes + engine.opened


def _synced(config: Config, engine: EngineSizes, moment: Moment, gpu: Gpu) -> Moments:
    """Yields the moment of a sync, with what is staged on the device while there is room."""
    staged = 0
    if config.sync.atomic and config.rollout.sleep_level < 2:
        staged = max(0, min(engine.weights, gpu.bytes - sum(moment.values())))
        yield "staging", {**moment, "staged": moment["staged"] + staged}
    yield "sync", {**moment, "staged": moment["staged"] + staged}


def _engine_moments(config: Config, engine: EngineSizes, gpu: Gpu) -> Moments:
    """Yields the moments of an engine rank, without the trainer on the same GPU."""
    for phase in ("startup", "rollout", "exchange", "probe"):
        yield phase, engine.sampling()
    written = engine.writing(config.rollout.sleep_level)
    yield from _synced(config, engine, {**written, "staged": _in_flight(config, engine)}, gpu)


def _kv(config: Config, fleet: Fleet, engine: EngineSizes) -> Mapping[str, int]:
    """Returns how many sequences of the maximum length all replicas hold at once, and in how many
    waves they sample a step."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    tokens = max(0, engine.kv_cache) // engine.per_token
    sequences = tokens // longest * (fleet.receivers // rollout.ranks_per_sampler)
    rows = config.train.prompts_per_step * rollout.samples_per_prompt
    return {
        "tokens_per_gpu": tokens,
        "sequences": sequences,
        "sequence_tokens": longest,
        "waves": -(-rows // sequences) if sequences else 0,
    }


def _host(
    config: Config, fleet: Fleet, ranks: Sequence[_TrainerRank], engine: EngineSizes | None
) -> Moment:
    """Returns the bytes per node of what is moved to the host, and of a checkpoint until it is
    written."""
    states = max((rank.states for rank in ranks), key=lambda each: sum(map(_state_bytes, each)))
    # gradients are freed, not moved
    moved = sum(map(_state_bytes, states)) - sum(_state_bytes(x.kept(config)) for x in states)
    optimizer = sum(state.on_host for state in states)
    host = {"offloaded": moved, "optimizer": optimizer}
    if config.algorithm.needs_reference and config.reference is None and not config.lora:
        host["reference"] = states[0].weights
    if engine and not fleet.is_split and config.rollout.sleep_level == 1:
        host["engine"] = engine.weights
    if config.checkpoint.every:  # a data rank copies the weights of its share of the state
        per_state = 12 / 8 if config.train.dtype == "fp32" else 14 / 12
        held = optimizer + sum(state.optimizer for state in states)
        host["checkpoint"] = int(per_state * held)
    return {name: fleet.ranks_per_node * size for name, size in host.items()}


def _state_bytes(state: State) -> int:
    return state.weights + state.optimizer


def _problems(
    config: Config, plan: MemoryPlan, engine: EngineSizes | None
) -> Iterator[MemoryProblem]:
    limit = plan.gpu.bytes
    if engine:
        longest = plan.kv["sequence_tokens"]
        needed = engine.per_token * (config.rollout.max_model_len or longest)
        if engine.kv_cache < needed:
            share = int(config.rollout.gpu_memory_utilization * limit)
            component = "kv_cache" if engine.kv_cache > 0 else "weights"
            missing = needed - engine.kv_cache
            yield MemoryProblem("engine", "rollout", component, share + missing, share)
    for side, peaks in (("trainer", plan.trainer), ("engine", plan.engine)):
        for phase, peak in peaks.items():
            if peak.peak_bytes > limit and phase != "train":
                largest = max(peak.components, key=lambda name: peak.components[name])
                yield MemoryProblem(side, phase, largest, peak.peak_bytes, limit)
