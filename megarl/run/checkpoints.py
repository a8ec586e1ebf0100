"""What a rank writes: checkpoints, also when a check fails, and Hugging Face folders."""

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
from megarl.models.shards import slices_by_rank
from megarl.platform.device import DTYPES
from megarl.roles import Checkpoint, Stateful
from megarl.run.context import Rank
from megarl.run.models import Learner
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.heads import Head, RewardHead, ValueHead
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, ObjectiveState
from megarl.weights.encode.quantize import PLAIN, Storage
from megarl.weights.sync.publish import WeightFormat


def make_checkpoints(
    rank: Rank,
    trainer: Trainer,
    prompts: Stateful,
    state: ObjectiveState,
    learner: Learner | None = None,
    further: Further | None = None,
) -> Checkpoints:
    """Returns the checkpoints of a run: of the trainer, the learner's critic and `further`."""
    config = rank.config
    further = further or Further()
    if isinstance(learner, ActorCritic):
        further = replace(further, models={CRITIC: learner.critic, **further.models})
    _storage(rank)  # an impossible export fails now
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
    """Saves the progress so far if a check refuses to continue, or SIGTERM arrives.

    Both are raised on every rank.
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


def export(rank: Rank, trainer: Trainer, step: int | None = None) -> None:
    """Writes the trained weights as checkpoint.export_hf requests. A collective.

    The folder is runs/<name>/hf at the end (no `step`), or hf_step_<step>. LoRA's adapters are
    always written at the end, as a PEFT folder: runs/<name>/adapter.
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
            weights=WeightFormat(adapters.shapes, dtype),
            sources=slices_by_rank(adapters.table, rank.shape, rank.layout),
            parameters=lambda: adapters.parameters,
            transport=rank.transport,
            changes={CONFIG: adapters.peft_config(str(rank.model_folder))},
        )
    if not is_due:
        return
    export_hf(
        rank.config.run_dir / f"hf{suffix}",
        origin=rank.model_folder,
        weights=WeightFormat(trainer.hf_shapes(), dtype, fp32_tensors(rank.shape)),
        sources=trainer.slices_by_rank(),
        parameters=trainer.merged_parameters,
        transport=rank.transport,
        storage=_storage(rank),
        changes=_changes_by_head(rank, trainer.head),
    )


def _storage(rank: Rank) -> Storage:
    """Returns the format of exports; raises ValueError if it is impossible for this model."""
    options = rank.config.checkpoint
    if options.export_hf == "never" or options.export_format == "bf16":
        return PLAIN
    return HfFolder(rank.model_folder).export_storage()


def _changes_by_head(rank: Rank, head: Head) -> dict[str, dict[str, Any]]:
    """Returns the keys of config.json and tokenizer_config.json that differ with this head."""
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
