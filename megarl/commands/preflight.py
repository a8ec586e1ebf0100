"""All checks of a config before any process starts, and the summary that --dry-run prints.

`megarl.config.validate` checks numbers; this module checks tokenizer, tasks, rewards and trackers.
Neither imports torch, except for the model's tokenizer, which is loaded if a setting needs it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from megarl.config.load import resolved_yaml, run_dir
from megarl.config.schema import Config, Create
from megarl.config.stages import needs_engine
from megarl.config.validate import Job, check_config
from megarl.data.conversations import example_encoder
from megarl.data.feedback import check_feedback
from megarl.data.media import check_model_media
from megarl.data.rows import Problem, errors_of, reference_text
from megarl.data.tasks import Source, check_tasks, load_sources
from megarl.data.tokenizer import (
    Encode,
    Example,
    Tokenizer,
    check_tokenizer,
    end_warnings,
    exceeds_vocabulary,
    load_tokenizer,
    may_not_end,
    prompt_encoder,
    tokenizer_files,
)
from megarl.models.hub import copied_files, is_hub_id, model_folder
from megarl.models.weights import check_weights, has_weights
from megarl.platform.env import Env
from megarl.platform.packages import require
from megarl.rewards.catalog import check_problems, make_rewards
from megarl.telemetry.trackers import check_trackers

MAX_ENCODED = 200  # problems of a source, evenly spaced, whose tokens are checked


def preflight(config: Config, env: Env, *, command: str = "train") -> Job:
    """Raises ValueError or FileNotFoundError with a one-line message."""
    model = config.model
    folder = None
    if model.path is not None and model.create is None:
        folder = model_folder(model.path, model.revision)
        check_model_media(folder, ignore=config.task.ignore_media)
    job = check_config(config, env, command=command)
    engine = []
    if needs_engine(config.stage, command):
        engine = ["vllm"]
    require(f"megarl {command}", "torch", "megatron.core", *engine)
    if config.launch.topology == "split":
        require("launch.topology=split", "ray")
    if config.precision.fp8 and job.gpus:
        require("precision.fp8", "transformer_engine")
    if folder is not None:
        check_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        if not is_hub_id(model.path or "") and has_weights(folder):  # not yet downloaded
            check_weights(folder, job.model)
        copied_files(folder)
    is_evaluated = command == "eval" or config.eval.every > 0
    check = ProblemCheck(config, folder, command)
    notes = tuple(check_tasks(config.task, config.eval, held_out=is_evaluated, check=check))
    notes += tuple(check.warnings())
    if needs_engine(config.stage, command):
        sources = partial(load_sources, config.task)
        for rewards in (config.rewards, config.iterative.reward_model.labels):
            notes += tuple(check_problems(make_rewards(rewards), sources))
    if command == "train" and env.is_main:
        check_trackers(config.telemetry)
    return replace(job, warnings=job.warnings + notes)


class ProblemCheck:
    """Checks what each problem of a source has, and the tokens of some: `MAX_ENCODED`, and one of
    each sequence of roles; or of all, if the tokenizer has tokens that the model does not have.

    The tokenizer is loaded only if something needs it.
    """

    def __init__(self, config: Config, folder: Path | None, command: str) -> None:
        self.config = config
        self.folder = folder
        learns = config.stage_spec.learns
        self.learns_feedback = learns == "feedback" and command == "train"
        self.learns_answers = learns == "answers"
        task = config.task
        self.can_encode = folder is None or bool(tokenizer_files(folder))
        self.needs_tokenizer = bool(
            task.template == "chat"
            or task.system_prompt
            or task.template_args
            or config.rollout.stop
            or (folder and self.can_encode and may_not_end(folder))
        )

    def __call__(self, source: Source) -> None:
        """Raises ValueError, with file and line."""
        if self.learns_feedback:
            check_feedback(source, steps=self.config.reward_model.process)
        if self.needs_tokenizer:
            _ = self._encode  # raises for settings
        size = source.size or 1
        every = -(-size // MAX_ENCODED)
        if self.folder is not None and exceeds_vocabulary(self.folder):
            every = 1
        limit = self.config.rollout.max_prompt_tokens
        lengths = []
        shapes = set()
        problems = source.problems() if source.size else [source.problem(0)]
        for number, problem in enumerate(problems):
            with errors_of(problem.where):
                is_new = (shape := self._shape(problem)) not in shapes
                shapes.add(shape)
                needs_tokens = self.needs_tokenizer or any(shape) or len(problem.text) > limit
                if self.can_encode and needs_tokens and (is_new or number % every == 0):
                    lengths.append(self._length(problem))
        if len(lengths) == size and not any(0 < length <= limit for length in lengths):
            raise ValueError(
                f"{source.problem(0).where}: none of the {size} prompts has 1 to "
                f"rollout.max_prompt_tokens={limit} tokens (they have {min(lengths)} to "
                f"{max(lengths)}); raise it, or choose a task with other prompts"
            )

    def _shape(self, problem: Problem) -> tuple[str, ...]:
        """Returns the roles of the messages, on which a chat template depends; () for plain text.

        Raises ValueError if stage sft finds nothing to learn, or an answer must be text and is not.
        """
        question = problem.question
        completion = problem.extra.get("completion")
        roles = ()
        if not isinstance(question, str):
            roles = tuple(message["role"] for message in question)
        if self.learns_answers:
            if problem.answer is not None:
                reference_text(problem.answer)
            if problem.answer is None and completion is None and not roles:
                raise ValueError(
                    "it has no answer, but stage: sft trains on answers; write `answer`, "
                    f"`completion` or `messages` (it has {', '.join(problem.extra) or 'no more'})"
                )
            if completion is not None:
                roles += (type(completion).__name__,)
        return roles

    def _length(self, problem: Problem) -> int:
        example = None
        if self.learns_answers:
            example = self._example(problem)
        return len(example[0] if example else self._encode(problem.question))

    def warnings(self) -> Iterator[str]:
        if self.config.task.ignore_media:
            yield "task.ignore_media: images, audio and video are left out; only text is trained on"
        if self.needs_tokenizer:
            yield from end_warnings(self._tokenizer, self.config.rollout.stop)

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

    @cached_property
    def _encode(self) -> Encode:
        return prompt_encoder(self._tokenizer, self.config.task)

    @cached_property
    def _example(self) -> Callable[[Problem], Example | None]:
        return example_encoder(self._tokenizer, self.config.task, self.config.sft.roles)


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
