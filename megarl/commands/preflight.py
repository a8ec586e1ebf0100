"""Checks a config before any process starts, and describes the job for --dry-run.

`megarl.config.validate` checks numbers; this module checks weights, tokenizer, tasks, rewards and
trackers. Neither imports torch, except to load a tokenizer: always for a model folder, and if
needed for a random model.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

from megarl.config.load import resolved_yaml
from megarl.config.schema import Config, Create
from megarl.config.stages import needs_engine
from megarl.config.validate import Job, check_config
from megarl.data.conversations import example_encoder
from megarl.data.feedback import check_feedback, ranked_responses
from megarl.data.media import check_model_media
from megarl.data.rows import Problem, Source, errors_of, reference_text
from megarl.data.tasks import check_tasks
from megarl.data.tokenizer import Example, Tokenizer, end_warnings, load_tokenizer
from megarl.models.hub import copied_files, is_hub_id, model_folder
from megarl.models.registry import check_architectures
from megarl.models.weights import check_weights
from megarl.platform.env import Env, gpu_model, require
from megarl.rewards.catalog import check_problems, make_rewards
from megarl.telemetry.trackers import check_trackers
from megarl.weights.plan.memory import check_memory

# columns that a stage reads in addition to prompt and answer, by what the stage learns
READ = {
    "answers": "completion",
    "feedback": "chosen rejected margin responses ranks scores completions labels",
}
MAX_TOKENIZED = 200  # number of problems per source, evenly spaced, that are tokenized


def preflight(config: Config, env: Env, *, command: str = "train", is_dry: bool = True) -> Job:
    """Checks the config for `command`; returns the job, with warnings. With `is_dry`, a model
    may be a config.json alone.

    Raises ValueError or FileNotFoundError, with a one-line message, for an invalid config.
    """
    model = config.model
    folder = None
    if model.path is not None and model.create is None:
        folder = model_folder(model.path, model.revision)
        check_model_media(folder, ignore=config.task.ignore_media)
    job = check_config(config, env, command=command, is_dry=is_dry)
    if command == "train":
        job = replace(job, memory=_memory(config, job))
    notes = []
    engine = []
    if needs_engine(config.stage, command):
        engine = ["vllm"]
    require(f"megarl {command}", "torch", "megatron.core", *engine)
    if config.launch.is_split:
        require("launch.topology=split", "ray")
    uses_te = config.trainer.megatron_options.get("transformer_impl") != "local"
    if job.gpus and uses_te and env.local_rank == 0:
        check_transformer_engine()
    if folder is not None:
        if engine:
            check_architectures(folder)
        # weights of a hub model are not downloaded yet; Megatron checkpoints have no safetensors
        is_remote = is_hub_id(model.path or "") or (is_dry and _is_config_alone(folder))
        if not is_remote and not (folder / ".metadata").is_file():
            files = {tensor.file for tensor in check_weights(folder, job.model).values()}
            others = sorted({*folder.glob("*.safetensors")} - files)
            notes += [f"{file} is not read: it is not the model's" for file in others]
        copied_files(folder)
    is_evaluated = command == "eval" or config.eval.every > 0
    check = ProblemCheck(config, folder, command)
    notes += check_tasks(config.task, config.eval, held_out=is_evaluated, check=check)
    notes += check.notes
    if engine:
        for rewards in (config.rewards, config.iterative.reward_model.labels):
            notes += check_problems(make_rewards(rewards), lambda: check.sources)
    if command == "train" and env.is_main:
        check_trackers(config.telemetry)
    return replace(job, warnings=(*job.warnings, *notes))


def _memory(config: Config, job: Job) -> str:
    """Returns what `check_memory` does; raises ValueError if the config does not fit."""
    if job.model.bridge is not None:
        return f"not checked: {job.model.family} has no table"
    return check_memory(config, job.world, gpu_model() if job.gpus else "")


def check_transformer_engine() -> None:
    """Raises ValueError if Transformer Engine does not load; it must be built for this torch.

    Imports it in another process, because an import may create a CUDA context.
    """
    require("training on a GPU", "transformer_engine")
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().split("\n")[-1]
        raise ValueError(
            f"Transformer Engine does not load beside torch {version('torch')}: {reason}; build "
            "it for this torch: pip install --no-build-isolation --no-cache-dir --force-reinstall "
            f"--no-deps transformer-engine-torch=={version('transformer-engine')}"
        )


def _is_config_alone(folder: Path) -> bool:
    """Returns True if the folder has only config.json, for dry runs and plans of a weight sync."""
    return [file.name for file in folder.iterdir()] == ["config.json"]


class ProblemCheck:
    """Checks the columns and tokens of a source's problems; collects warnings in `notes`.

    Reads every problem, but tokenizes only up to MAX_TOKENIZED problems and the first problem of
    each shape (roles of the messages, types of answer and completion). If the tokenizer has tokens
    beyond the model's vocabulary, tokenizes all problems.
    """

    def __init__(self, config: Config, folder: Path | None, command: str) -> None:
        self.config = config
        self.folder = folder
        self.learns: str = config.stage_spec.learns
        if self.learns == "feedback" and command != "train":
            self.learns = "prompts"
        self.sources: list[Source] = []
        self.notes: list[str] = []
        self.unread: set[str] = set()
        self.encoder = cache(self._encoder)
        task = config.task
        has_tokenizer = folder and not _is_config_alone(folder)
        settings = (has_tokenizer, task.system_prompt, task.template_args, config.rollout.stop)
        self.is_tokenized = self.learns == "answers" or task.template == "chat" or any(settings)
        if self.is_tokenized:
            self.notes += end_warnings(self._tokenizer, config.rollout.stop)
            self.encoder(self.learns)  # raises for invalid settings
        if task.ignore_media:
            self.notes.append("task.ignore_media: images, audio and video are left out")

    def __call__(self, source: Source, is_eval_set: bool) -> None:
        """Checks a source; raises ValueError with file and line.

        Only the prompts of an evaluation set are checked.
        """
        self.sources.append(source)
        config = self.config
        learns = "prompts" if is_eval_set else self.learns
        if learns == "feedback":
            self.notes += check_feedback(
                source,
                steps=config.reward_model.process,
                ignore_media=config.task.ignore_media,
            )
        every = -(-(source.size or 1) // MAX_TOKENIZED)
        if self.is_tokenized and self._tokenizer.exceeds_model:
            every = 1
        shapes = set()
        lengths = {}  # place of a problem -> number of tokens
        limit = config.rollout.max_prompt_tokens
        is_long = True
        for number, problem in enumerate(source.problems()):
            if not number:
                self._check_columns(problem, learns)
            roles = ()
            if not isinstance(problem.question, str):
                roles = tuple(message["role"] for message in problem.question)
            shape = (roles, type(problem.answer), type(problem.extra.get("completion")))
            is_chosen = number % every == 0 or shape not in shapes
            shapes.add(shape)
            is_long = is_long and len(problem.text) > limit
            if is_chosen and (self.is_tokenized or roles or learns == "feedback"):
                with errors_of(problem.where):
                    lengths[problem.where] = self._length(problem, learns)
        if self.is_tokenized or is_long:
            from megarl.data.prompts import PromptStream  # imports torch

            stream = PromptStream([source], self.encoder(learns), limit)
            stream.take(1)  # raises if all prompts are too long
        self._check_lengths(lengths)

    def _check_columns(self, problem: Problem, learns: str) -> None:
        """Adds a warning for columns of a source's first row that are not part of any sequence."""
        names = {name for name, value in problem.extra.items() if not callable(value)}
        names.difference_update(READ.get(learns, "").split())
        if names - self.unread:
            readers = "only rewards read" if learns == "prompts" else "nothing reads"
            self.notes.append(
                f"{problem.where}: {readers} {', '.join(sorted(names))}; this is fine unless they "
                "are parts of the prompt, all columns of which task.options.prompt must list"
            )
        self.unread |= names

    def _length(self, problem: Problem, learns: str) -> int:
        """Returns the number of tokens of a prompt and its longest response to learn; 0 if the
        prompt is too long and therefore skipped.
        """
        tokens, mask = self.encoder(learns)(problem)
        texts = []
        if learns == "feedback" and not self.config.reward_model.process:
            texts, _, _ = ranked_responses(
                problem.extra,
                problem.text,
                problem.where,
                ignore_media=self.config.task.ignore_media,
            )
        elif learns == "answers" and not mask:
            texts = [reference_text(problem.answer)]
        if len(tokens) > self.config.rollout.max_prompt_tokens:
            return 0
        longest = max((len(self._tokenizer.encode_answer(text)) for text in texts), default=0)
        return len(tokens) + longest

    def _check_lengths(self, lengths: Mapping[str, int]) -> None:
        rollout = self.config.rollout
        most = rollout.max_prompt_tokens + rollout.max_tokens
        long = [where for where, length in lengths.items() if length > most]
        if long:
            note = (
                f"{long[0]} has {lengths[long[0]]} tokens, prompt and response, as {len(long)} of "
                f"the {len(lengths)} rows that were encoded have more than "
                f"rollout.max_prompt_tokens + rollout.max_tokens = {most}"
            )
            if len(long) == len(lengths):
                raise ValueError(f"{note}; raise them, or shorten the responses")
            self.notes.append(note)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        config = self.config
        if self.folder is not None:
            return load_tokenizer(
                self.folder,
                trust_remote_code=config.model.trust_remote_code,
                template=config.task.template,
            )
        from megarl.commands.random_model import random_tokenizer

        return random_tokenizer(config.model.create or Create())

    def _encoder(self, learns: str) -> Callable[[Problem], Example]:
        roles = self.config.sft.roles if learns == "answers" else ()
        return example_encoder(self._tokenizer, self.config.task, roles)


def describe(config: Config, job: Job) -> str:
    """Returns the resolved config, the model, the processes and the sizes of a step, as text."""
    train = config.train
    shape = job.model
    samples = engine = ""
    if config.stage_spec.needs_engine:
        samples = f" x {config.rollout.samples_per_prompt} samples"
        engine = f"; vLLM: {job.replicas} replicas of {config.rollout.layout}"
    experts = ""
    if shape.is_moe:
        experts = f", {shape.experts} experts"
    where = "(no GPU here)"
    if job.gpus:
        where = f"on {job.gpus} GPUs per node"
    if config.launch.is_split:
        where = "trainer ranks in a Ray cluster"
    lines = [
        resolved_yaml(config).rstrip(),
        "",
        f"model      {shape.family}: {shape.layers} layers of {shape.hidden}, {shape.heads} heads "
        f"({shape.kv_heads} kv), vocabulary {shape.vocab}{experts}",
        f"processes  {job.world} {where}; Megatron-Core: {job.layout} (data {job.layout.dp.size})"
        f"{engine}",
        f"memory     {job.memory}",
        f"step       {train.prompts_per_step} prompts{samples} = {job.rows} rows of at most "
        f"{job.longest_row} tokens; {train.updates_per_step} updates of "
        f"{job.rows // train.updates_per_step} rows, micro-batches of at most "
        f"{train.max_tokens_per_microbatch} tokens",
        f"run        {train.steps} steps -> {config.run_dir}",
    ]
    return "\n".join(lines)
