"""Evaluation on held-out problems, sampled with the rollout engine.

problem sets -> k samples per problem -> accuracy, pass@k, 95% intervals -> eval.jsonl
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.algorithms.pass_at_k import ks_of, mean_interval, pass_at_k
from megarl.config.schema import Task
from megarl.data.tasks import eval_task
from megarl.rollout.sampling import request_seed
from megarl.rollout.schedule import Generate
from megarl.run.context import RankContext
from megarl.run.data import make_exchange, make_prompts
from megarl.run.models import make_reward_model
from megarl.run.sync import synced
from megarl.telemetry.log import NodeTelemetry
from megarl.telemetry.metrics import forget_steps
from megarl.types import Prompt, Request, Sample


def correctness(sample: Sample) -> float:
    """Returns 1.0 if the accuracy reward is at least 1.0, else 0.0.

    Without an accuracy reward, returns the total reward. Unscored samples return 0.0.
    """
    if sample.reward is None:
        return 0.0
    if "accuracy" in sample.rewards:
        return float(sample.rewards["accuracy"] >= 1.0)
    return sample.reward


# step -> metrics of a problem set: its size, and each value with its /low and /high bounds
Measure = Callable[[int], Mapping[str, float]]
Evaluated = Callable[[int, Mapping[str, Any]], None]  # step, results


@dataclass(frozen=True)
class ProblemSet:
    """A set of evaluation problems and how to sample them."""

    metric: str  # name of the mean score, for example aime/mean@4
    prompts: Callable[[], Sequence[Prompt]]  # returns the same problems on every call
    temperature: float
    samples: int = 1  # samples per problem


@dataclass(frozen=True)
class Evaluation:
    """Implements roles.Evaluation. Every rank must call every method."""

    measures: Sequence[Measure]
    every: int  # steps between evaluations; 0: never
    last_step: int
    file: Path | None = None  # eval.jsonl on rank 0 (which also prints the results), else None
    evaluated: Evaluated = lambda step, results: None  # Telemetry.evaluated
    # evaluated steps: the last step of an iteration is also the first of the next
    measured: set[int] = field(default_factory=set)

    def maybe_run(self, step: int) -> dict[str, Any] | None:
        """Evaluates at the first step, every `every` steps and at the last; else returns None."""
        is_due = self.every and (step % self.every == 0 or step == self.last_step)
        if not is_due or step in self.measured:
            return None
        return self.run(step)

    def run(self, step: int) -> dict[str, Any]:
        """Evaluates, records the results, and returns {"step": step} and each set's metrics.

        Each metric comes with the bounds of its 95% interval, <metric>/low and <metric>/high.
        """
        self.measured.add(step)
        result: dict[str, Any] = {"step": step}
        for measure in self.measures:
            result |= measure(step)
        if self.file:
            forget_steps(self.file, step, result)
            print(describe(result))
        self.evaluated(step, result)
        return result


def sampled(generate: Generate, run_seed: int, part: ProblemSet, step: int) -> dict[str, float]:
    """Samples a problem set with the engine; returns its size, mean score and pass@k."""
    prompts = part.prompts()
    requests = [
        Request(
            prompt,
            index,
            request_seed(run_seed, -1, prompt.prompt_id, index),
            part.temperature,
        )
        for prompt, index in product(prompts, range(part.samples))
    ]
    scores = {prompt.prompt_id: [] for prompt in prompts}
    for sample in generate(requests, version=step):
        scores[sample.prompt_id].append(correctness(sample))
    samples = part.samples if set(chain.from_iterable(scores.values())) <= {0.0, 1.0} else None
    means = [fmean(values) for values in scores.values()]
    prefix = _prefix(part.metric)
    result = {f"{prefix}size": len(prompts), **with_interval(part.metric, means, samples)}
    for k in ks_of(part.samples):
        passed = []
        for values in scores.values():
            num_right = sum(value >= 1.0 for value in values)
            passed.append(pass_at_k(len(values), num_right, k))
        result |= with_interval(f"{prefix}pass@{k}", passed, part.samples)
    return result


def _prefix(metric: str) -> str:
    """Returns the prefix that a set's metrics share: "aime/", or "" for the task's own problems."""
    return metric[: metric.rfind("/") + 1]


def with_interval(name: str, scores: Sequence[float], samples: int | None = 1) -> dict[str, float]:
    """Returns the mean score and the bounds of its 95% interval (see `mean_interval`)."""
    low, high = mean_interval(scores, samples)
    return {name: fmean(scores), f"{name}/low": low, f"{name}/high": high}


def describe(result: Mapping[str, Any]) -> str:
    """Formats an evaluation as a table: metric, value, 95% interval, number of problems."""
    lines = [f"step {result['step']:<19} value  95% interval    problems"]
    for name, value in result.items():
        if f"{name}/low" in result:
            interval = f"{result[f'{name}/low']:.3f} .. {result[f'{name}/high']:.3f}"
            lines.append(f"{name:<24} {value:.3f}  {interval}  {result[f'{_prefix(name)}size']}")
    return "\n".join(lines)


def run(rank: RankContext) -> None:
    """Runs `megarl eval` on this rank."""
    trainer, engine, *_ = synced(rank)
    exchange = make_exchange(rank, engine, reward_model=make_reward_model(rank, trainer))
    evaluation_of(rank, exchange, 0, NodeTelemetry().evaluated).run(0)


def evaluation_of(
    rank: RankContext, generate: Generate, start: int, evaluated: Evaluated
) -> Evaluation:
    """Returns the evaluation of the configured problem sets, sampled with `generate`.

    `start` is the number of steps already done.
    """
    config = rank.config

    def problems(size: int, task: Task) -> Callable[[], list[Prompt]]:
        return cache(lambda: make_prompts(rank, "eval", task).take(size, repeat=False))

    sets = []
    if config.eval.size:
        held_out = problems(config.eval.size, config.task)
        score = "reward"
        if "accuracy" in [reward.name for reward in config.rewards]:
            score = "accuracy"
        sets = [
            ProblemSet(score, held_out, config.eval.temperature),
            ProblemSet(f"sampled_{score}", held_out, config.rollout.temperature),
        ]
    for part in config.eval.sets:
        temperature = part.temperature
        if temperature is None:
            temperature = config.rollout.temperature
        prompts = problems(part.size, eval_task(config.task, part))
        sets.append(
            ProblemSet(f"{part.name}/mean@{part.samples}", prompts, temperature, part.samples)
        )
    measures = [partial(sampled, generate, config.run.seed, part) for part in sets]
    return make_evaluation(rank, measures, start, evaluated)


def make_evaluation(
    rank: RankContext, measures: Sequence[Measure], start: int, evaluated: Evaluated
) -> Evaluation:
    """Returns an evaluation that runs `measures`; `start` is the number of steps already done.

    Rank 0 writes the results to eval.jsonl and prints them. On resume, the lines of steps after
    `start` are removed from eval.jsonl; a line of step `start` stays until its replacement.
    """
    config = rank.config
    file = None
    if rank.env.is_main:
        file = config.run_dir / "eval.jsonl"
        if file.exists():  # a resumed run evaluates these steps again
            forget_steps(file, start + 1)
    return Evaluation(measures, config.eval.every, config.train.steps, file, evaluated)
