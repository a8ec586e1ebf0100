"""All checks of a config before any process starts, and the summary that --dry-run prints.

`megarl.config.validate` checks numbers; this module adds those of tokenizer, tasks, rewards and trackers. Neither
imports torch, except with the model's tokenizer, which is loaded where a setting depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.config.load import resolved_yaml, run_dir
from megarl.config.names import ENGINE_STAGES
from megarl.config.schema import Config, Create
from megarl.config.validate import ENGINE_COMMANDS, Job, check_config
from megarl.data.conversations import example_encoder
from megarl.data.feedback import check_feedback
from megarl.data.tasks import check_tasks, load_sources
from megarl.data.tokenizer import check_tokenizer, load_tokenizer, prompt_encoder, stop_token_ids
from megarl.models.hub import model_folder
from megarl.platform.env import Env
from megarl.rewards.catalog import check_problems, make_rewards
from megarl.telemetry.trackers import check_trackers


def preflight(config: Config, env: Env, *, command: str = "train") -> Job:
    """Raises ValueError or FileNotFoundError with a one-line message."""
    job = check_config(config, env, command=command)
    model = config.model
    folder = model_folder(model.path, model.revision) if model.path is not None else None
    if folder is not None:
        check_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    is_evaluated = command == "eval" or config.eval.every > 0
    learns_feedback = command == "train" and config.stage in ("dpo", "reward_model")
    check = partial(check_feedback, steps=config.reward_model.process) if learns_feedback else None
    notes = tuple(check_tasks(config.task, config.eval, held_out=is_evaluated, check=check))
    if config.stage in ENGINE_STAGES or command in ENGINE_COMMANDS:
        notes += tuple(
            check_problems(make_rewards(config.rewards), partial(load_sources, config.task))
        )
    _check_text(config, folder)
    if command == "train" and env.is_main:
        check_trackers(config.telemetry)
    return replace(job, warnings=job.warnings + notes)


def _check_text(config: Config, folder: Path | None) -> None:
    """Raises ValueError for settings that the model's tokenizer cannot follow; without such settings, loads nothing."""
    task, stop = config.task, config.rollout.stop
    firsts = [source.problem(0) for source in load_sources(task)] if config.stage == "sft" else []
    has_examples = any(not isinstance(p.question, str) or "completion" in p.extra for p in firsts)
    if not (
        has_examples or task.template == "chat" or task.system_prompt or task.template_args or stop
    ):
        return
    if folder is not None:
        tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    else:
        from megarl.launch.random_model import random_tokenizer

        tokenizer = random_tokenizer(config.model.create or Create())
    encode, example = (
        prompt_encoder(tokenizer, task),
        example_encoder(tokenizer, task, config.sft.roles),
    )
    for problem in firsts or [source.problem(0) for source in load_sources(task)]:
        if config.stage != "sft" or example(problem) is None:
            encode(problem.question)
    stop_token_ids(tokenizer, stop)


def describe(config: Config, job: Job) -> str:
    """Returns the resolved config, the processes and the sizes of a step, as text."""
    train, shape = config.train, job.model
    moe = f", {shape.experts} experts ({shape.experts_per_token} per token)" if shape.is_moe else ""
    per_update = job.rows // train.updates_per_step
    epochs = f" in each of {train.epochs_per_batch} epochs" if train.epochs_per_batch > 1 else ""
    samples = (
        f" x {config.rollout.samples_per_prompt} samples" if config.stage in ENGINE_STAGES else ""
    )
    device = f"{job.gpus} GPUs per node" if job.gpus else "CPU"
    engine = (
        f"; vLLM: {job.replicas} replicas of tp{config.rollout.tensor}"
        if config.stage in ENGINE_STAGES
        else ""
    )
    where = (
        "trainer ranks in a Ray cluster" if config.launch.topology == "split" else f"on {device}"
    )
    lines = [
        resolved_yaml(config).rstrip(),
        "",
        f"model      {shape.family}: {shape.layers} layers of {shape.hidden}, {shape.heads} heads "
        f"({shape.kv_heads} kv), vocabulary {shape.vocab}{moe}",
        f"processes  {job.world} {where}; Megatron-Core: {job.layout} (data {job.layout.dp.size}){engine}",
        f"step       {train.prompts_per_step} prompts{samples} = {job.rows} rows of at most {job.longest_row} tokens; "
        f"{train.updates_per_step} updates of {per_update} rows{epochs}, "
        f"micro-batches of at most {train.max_tokens_per_microbatch} tokens",
        f"run        {train.steps} steps -> {run_dir(config)}",
    ]
    return "\n".join(lines)
