"""Writes checkpoints, including one when a check fails, and exports Hugging Face folders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.checkpoint.hf_files import export_hf
from megarl.checkpoint.hf_folder import HfFolder
from megarl.checkpoint.state import Checkpoints, Further
from megarl.checkpoint.torch_dist import CRITIC
from megarl.data.tokenizer import pad_token
from megarl.models.lora import CONFIG
from megarl.models.registry import FAMILIES, fp32_tensors
from megarl.platform.device import DTYPES
from megarl.roles import Checkpoint, Stateful
from megarl.run.context import RankContext
from megarl.trainer.actor_critic import ActorCritic, Learner
from megarl.trainer.heads import Head, RewardHead, ValueHead
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState
from megarl.weights.encode.quantize import PLAIN, Storage
from megarl.weights.sync.publish import WeightFormat


def make_checkpoints(
    rank: RankContext,
    trainer: Trainer,
    prompts: Stateful,
    state: ObjectiveState,
    learner: Learner | None = None,
    further: Further | None = None,
) -> Checkpoints:
    """Builds the run's Checkpoints, which save the trainer, the learner's critic, and `further`.

    Raises ValueError if the configured export format is impossible for this model.
    """
    config = rank.config
    further = further or Further()
    if isinstance(learner, ActorCritic):
        further = replace(further, models={CRITIC: learner.critic, **further.models})
    _storage(rank)  # raise for an impossible export format now, not at the end of the run
    return Checkpoints(
        config.run_dir / "checkpoints",
        trainer,
        prompts,
        state,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        last_step=config.train.steps,
        asynchronous=config.checkpoint.asynchronous,
        export=partial(export, rank, trainer),
        further=further,
    )


@contextmanager
def saved(
    trainers: Sequence[Trainer], checkpoint: Checkpoint, sleep: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Saves a checkpoint before re-raising CheckFailed (a refused check, or Terminated after
    SIGTERM). Both are raised on every rank.

    `sleep` is called before the trainers are onloaded. On success, waits for unfinished writes.
    """
    try:
        yield
    except CheckFailed:
        sleep()
        for trainer in trainers:
            trainer.memory.onload_all()
        checkpoint.save()
        checkpoint.finish()
        raise
    checkpoint.finish()


def export(rank: RankContext, trainer: Trainer, step: int | None = None) -> None:
    """Exports the trained weights as a Hugging Face folder if checkpoint.export_hf requests it.

    Every rank must call it. Without `step` (at the end of the run), the folder is runs/<name>/hf;
    otherwise it is runs/<name>/hf_step_<step>. LoRA adapters are exported as a PEFT folder,
    runs/<name>/adapter[_step_<step>], at the end even if export_hf is "never".
    """
    when = rank.config.checkpoint.export_hf
    is_due = when != "never"
    suffix = ""
    if step is not None:
        is_due = isinstance(when, int) and step % when == 0
        suffix = f"_step_{step}"
    dtype = DTYPES[rank.config.train.dtype]
    adapters = trainer.adapters
    if adapters is not None and (is_due or step is None):
        export_hf(
            rank.config.run_dir / f"adapter{suffix}",
            origin=None,
            weights=WeightFormat(adapters.tensors.shapes, dtype),
            sources=adapters.tensors.by_rank(),
            parameters=lambda: adapters.parameters,
            transport=rank.transport,
            changes={CONFIG: adapters.peft_config(str(rank.model_folder))},
        )
    if not is_due:
        return
    export_hf(
        rank.config.run_dir / f"hf{suffix}",
        origin=rank.model_folder,
        weights=WeightFormat(trainer.tensors.shapes, dtype, fp32_tensors(rank.shape)),
        sources=trainer.tensors.by_rank(),
        parameters=trainer.merged_parameters,
        transport=rank.transport,
        storage=_storage(rank),
        changes=_changes_by_head(rank, trainer.head),
    )


def _storage(rank: RankContext) -> Storage:
    """Returns the storage format of exports; raises ValueError if the model does not support it."""
    options = rank.config.checkpoint
    if options.export_hf == "never" or options.export_format == "bf16":
        return PLAIN
    return HfFolder(rank.model_folder).export_storage()


def _changes_by_head(rank: RankContext, head: Head) -> dict[str, dict[str, Any]]:
    """Returns {file name: keys to change} for config.json and tokenizer_config.json with a value
    or reward head; empty for a language model.
    """
    if not isinstance(head, ValueHead):
        return {}
    name = FAMILIES[rank.shape.family].architecture.removesuffix("ForCausalLM") + head.architecture
    pad, text = pad_token(rank.tokenizer)
    config = {
        "architectures": [name],
        "num_labels": head.outputs,
        "id2label": None,
        "label2id": None,
    }
    if isinstance(head, RewardHead):
        config["megarl_reward_head"] = {"kind": head.kind, "aggregate": head.aggregate}
    changes = {"config.json": config | {"pad_token_id": pad}}
    if text is not None and (rank.model_folder / "tokenizer_config.json").is_file():
        changes["tokenizer_config.json"] = {"pad_token": text}
    return changes
