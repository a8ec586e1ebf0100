"""All checks of a config before any process starts, and the summary that --dry-run prints.

`megarl.config.validate` checks numbers; this module checks tokenizer, tasks, rewards and trackers.
Neither imports torch, except for the model's tokenizer, which is loaded if a setting needs it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.config.load import resolved_yaml, run_dir
from megarl.config.schema import Config, Create
from megarl.config.stages import needs_engine
from megarl.config.validate import Job, check_config
from megarl.data.conversations import example_encoder
from megarl.data.feedback import check_feedback
from megarl.data.tasks import check_tasks, load_sources
from megarl.data.tokenizer import check_tokenizer, load_tokenizer, prompt_encoder, stop_token_ids
from megarl.models.hub import model_folder
from megarl.platform.env import Env
from megarl.platform.packages import require
from megarl.rewards.catalog import check_problems, make_rewards
from megarl.telemetry.trackers import check_trackers


def preflight(config: Config, env: Env, *, command: str = "train") -> Job:
    """Raises ValueError or FileNotFoundError with a one-line message."""
    job = check_config(config, env, command=command)
    engine = ["vllm"] if needs_engine(config.stage, command) else []
    require(f"megarl {command}", "torch", "megatron.core", *engine)
    if config.launch.topology == "split":
        require("launch.topology=split", "ray")
    if config.precision.fp8 and job.gpus:
        require("precision.fp8", "transformer_engine")
    model = config.model
    folder = None
    if model.path is not None:
        folder = model_folder(model.path, model.revision)
        check_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    is_evaluated = command == "eval" or config.eval.every > 0
    check = None
    if command == "train" and config.stage_spec.learns == "feedback":
        check = partial(check_feedback, steps=config.reward_model.process)
    notes = tuple(check_tasks(config.task, config.eval, held_out=is_evaluated, check=check))
    _check_text(config, folder)
    if needs_engine(config.stage, command):
        sources = partial(load_sources, config.task)
        for rewards in (config.rewards, config.iterative.reward_model.labels):
            notes += tuple(check_problems(make_rewards(rewards), sources))
    if command == "train" and env.is_main:
        check_trackers(config.telemetry)
    return replace(job, warnings=job.warnings + notes)


def _check_text(config: Config, folder: Path | None) -> None:
    """Raises ValueError for settings that the model's tokenizer cannot follow.

    Without such settings it loads nothing.
    """
    task = config.task
    stop = config.rollout.stop
    learns_answers = config.stage_spec.learns == "answers"
    firsts = []
    if learns_answers:
        firsts = [source.problem(0) for source in load_sources(task)]
    has_examples = any(not isinstance(p.question, str) or "completion" in p.extra for p in firsts)
    uses_template = task.template == "chat" or task.system_prompt or task.template_args
    if not (has_examples or uses_template or stop):
        return
    if folder:
        tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    else:
        from megarl.commands.random_model import random_tokenizer

        tokenizer = random_tokenizer(config.model.create or Create())
    encode = prompt_encoder(tokenizer, task)
    example = example_encoder(tokenizer, task, config.sft.roles)
    for problem in firsts or [source.problem(0) for source in load_sources(task)]:
        if not learns_answers or example(problem) is None:
            encode(problem.question)
    stop_token_ids(tokenizer, stop)


def describe(config: Config, job: Job) -> str:
    """Returns the resolved config, the processes and the sizes of a step, as text."""
    train = config.train
    shape = job.model
    moe = ""
    if shape.is_moe:
        moe = f", {shape.experts} experts ({shape.experts_per_token} per token)"
    epochs = ""
    if train.epochs_per_batch > 1:
        epochs = f" in each of {train.epochs_per_batch} epochs"
    samples = engine = ""
    if config.stage_spec.needs_engine:
        samples = f" x {config.rollout.samples_per_prompt} samples"
        engine = f"; vLLM: {job.replicas} replicas of tp{config.rollout.tensor}"
    where = "on CPU"
    if job.gpus:
        where = f"on {job.gpus} GPUs per node"
    if config.launch.topology == "split":
        where = "trainer ranks in a Ray cluster"
    lines = [
        resolved_yaml(config).rstrip(),
        "",
        f"model      {shape.family}: {shape.layers} layers of {shape.hidden}, {shape.heads} heads "
        f"({shape.kv_heads} kv), vocabulary {shape.vocab}{moe}",
        f"processes  {job.world} {where}; Megatron-Core: {job.layout} (data {job.layout.dp.size})"
        f"{engine}",
        f"step       {train.prompts_per_step} prompts{samples} = {job.rows} rows of at most "
        f"{job.longest_row} tokens; {train.updates_per_step} updates of "
        f"{job.rows // train.updates_per_step} rows{epochs}, micro-batches of at most "
        f"{train.max_tokens_per_microbatch} tokens",
        f"run        {train.steps} steps -> {run_dir(config)}",
    ]
    return "\n".join(lines)
