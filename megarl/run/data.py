"""The training data of a rank: prompts, and the samples that engine replicas generate for them."""

from contextlib import nullcontext
from functools import partial

from megarl.config.schema import Task
from megarl.data.conversations import example_encoder
from megarl.data.ledger import Ledger
from megarl.data.prompts import PromptStream
from megarl.data.tasks import Split, eval_task, load_sources
from megarl.layout import Axis
from megarl.platform.env import RESUME_CHANGED, get_env
from megarl.rewards.scorer import make_scorer
from megarl.roles import SpanContext
from megarl.rollout.exchange import Exchange
from megarl.rollout.reward_shaping import shaped
from megarl.rollout.schedule import Generate, Rollouts, has_spread
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.models import RewardModel

ROLLOUT_PATIENCE = 12  # multiple of launch.timeout_s that a replica may lag behind the others


def make_prompts(
    rank: RankContext, split: Split = "train", task: Task | None = None
) -> PromptStream:
    """Returns the prompt stream of `task` (default: the run's task).

    `split` is "train" or "eval" (held-out prompts). For stages that learn answers, the examples
    include them. Raises ValueError if the nodes read different revisions of the dataset.
    """
    config = rank.config
    task = task or config.task
    # each node resolves the dataset's revision on its own
    if len(set(rank.transport.gather(task.model_dump_json()))) > 1:
        raise ValueError(
            f"task.name={task.name}: the dataset changed while the nodes read it; start again"
        )
    held_out = [eval_task(task, part) for part in config.eval.sets] if split == "train" else []
    roles = config.sft.roles if config.stage_spec.learns == "answers" else ()
    return PromptStream(
        load_sources(task, split, held_out),
        example_encoder(rank.tokenizer, task, roles),
        max_tokens=config.rollout.max_prompt_tokens,
        seed=config.run.seed,
        accepts_changes=get_env(RESUME_CHANGED) is not None,
    )


def make_exchange(
    rank: RankContext,
    engine: Engine,
    span: SpanContext = nullcontext,
    reward_model: RewardModel | None = None,
) -> Exchange:
    """Returns the Exchange, which samples on this rank's replica and shares samples with all."""
    env = rank.env
    config = rank.config
    size = config.rollout.ranks_per_sampler
    score = partial(reward_model.score, engine, span) if reward_model is not None else list
    return Exchange(
        engine,
        make_scorer(config.rewards, decode=rank.tokenizer.decode, answer=config.task.answer),
        replica=Axis(env.world_size // size, env.rank // size),
        member=Axis(size, env.rank % size),
        finish=engine.finish,
        span=span,
        score=score,
        is_stopping=lambda: rank.phase.is_stopping,
        meet=partial(rank.transport.barrier, "the exchange of samples", patience=ROLLOUT_PATIENCE),
    )


def make_rollouts(rank: RankContext, generate: Generate, ledger: Ledger | None = None) -> Rollouts:
    """Builds the configured Rollouts, which sample with `generate`."""
    config = rank.config
    algorithm = config.algorithm
    return Rollouts(
        generate,
        samples_per_prompt=config.rollout.samples_per_prompt,
        temperature=config.rollout.temperature,
        run_seed=config.run.seed,
        has_spread=partial(has_spread, algorithm=algorithm),
        filter_zero_std=algorithm.filter_zero_std,
        max_refills=algorithm.max_refills,
        shape_reward=partial(shaped, algorithm, config.rollout.max_tokens),
        greedy_baseline=algorithm.needs_greedy_baseline,
        ledger=ledger,
    )
