"""The ranks of `megarl check`: compare trainer and engine, verify a sync, compare layouts."""

import json
import math
from dataclasses import replace

from megarl.config.load import changed
from megarl.data.collate import collate, supervised_batch
from megarl.layout import Layout
from megarl.parity.gate import difference
from megarl.parity.layouts import (
    SUPERVISED,
    check_layouts,
    prompt_rows,
    random_routes,
    with_rewards,
)
from megarl.rewards.scorer import make_scorer
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.run.data import make_exchange, make_prompts, make_rollouts
from megarl.run.models import make_learner, make_objective, make_trainer
from megarl.run.sync import synced
from megarl.trainer.actor_critic import Learner
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer
from megarl.types import CheckFailed, TrainBatch

PARITY_PROMPTS = 8
CHECKED_ROWS = 8  # rows in the batch of `megarl check --layouts`
RANDOM_TOKENS = 8  # random tokens after the prompt in rows without an answer to train on


def sync(rank: RankContext) -> None:
    """Runs `megarl check --sync` on this rank: one weight sync, verified like a run's first one."""
    _, _, gate, report = synced(rank)
    # a collective; the engine's rank with the largest difference, relative to rounding
    worst = max(gate.probe()[1], key=lambda excess: excess.statistic)
    if not rank.env.is_main:
        return
    print(f"{report.num_tensors} tensors verified: checksums, places, names and log-probs")
    print(
        f"{report.bytes_kept / 1e6:.1f} MB kept by {rank.env.world_size} ranks, "
        f"{report.bytes_received / 1e6:.1f} MB of them received from others"
    )
    print(worst, flush=True)


def parity(rank: RankContext) -> None:
    """Runs `megarl check --parity` on this rank.

    Raises CheckFailed if rounding does not explain the differences.
    """
    # this function judges the difference: disable the bound of the probe
    rank = replace(rank, config=changed(rank.config, "checks", max_logprob_diff=math.inf))
    trainer, engine, gate, _ = synced(rank)
    with engine.turn():
        batch = parity_batch(rank, engine)
    excess = gate.judge(batch)
    found = excess.found
    if rank.env.is_main:
        print(
            f"{found.count} sampled tokens, {rank.config.train.dtype}; |trainer - engine| in nats"
        )
        print(f"measured   {found}")
        print(f"floor      {excess.floor}")
        print(
            f"statistic  {excess.statistic:.3g}, at most {excess.limit:.3g} from rounding",
            flush=True,
        )
    if batch.choices:
        _report_choices(rank, trainer, batch)
    if excess.is_explained:
        return
    cause = gate.cause(batch) or "not found"
    raise CheckFailed(
        f"trainer and engine differ by more than rounding explains; {excess}; cause: {cause}"
    )


def _report_choices(rank: RankContext, trainer: Trainer, batch: TrainBatch) -> None:
    own_T = trainer.logprobs(replace(batch, choices=()))
    own = difference(batch, own_T[batch.mask])
    share = trainer.forward(batch).metrics["routing/differs"]
    if rank.env.is_main:
        pairs = f"{share:.2%} of (token, layer) pairs differ"
        print(f"routing    {pairs}; the engine's routes are replayed")
        print(f"           without replay {own}", flush=True)


def parity_batch(rank: RankContext, engine: Engine) -> TrainBatch:
    """Returns a batch of samples of PARITY_PROMPTS prompts, sampled as in a run, but not scored."""
    exchange = replace(make_exchange(rank, engine), rewards=make_scorer(()))
    rollouts = replace(make_rollouts(rank, exchange), filter_zero_std=False)
    rollout = rollouts.collect(make_prompts(rank), PARITY_PROMPTS, version=0)
    return collate(rollout.groups, temperature=rank.config.rollout.temperature)


def layouts(rank: RankContext) -> None:
    """Runs `megarl check --layouts` on this rank: compares the layouts listed in layouts.json, one
    after another, with the run's objective or, in stages without one, with the supervised loss.
    Rank 0 writes the results to check.json.
    """
    stage = rank.config.stage_spec
    has_objective = stage.needs_engine and not stage.compares
    batch = layout_batch(rank, has_objective=has_objective)
    lengths_N = batch.lengths_N
    # at least two micro-batches per rank
    limit = max(int(lengths_N.max()), batch.num_tokens // (2 * rank.env.world_size))
    once = {"updates_per_step": 1, "epochs_per_batch": 1}
    train = once | {
        "max_tokens_per_microbatch": min(limit, rank.config.train.max_tokens_per_microbatch)
    }
    config = changed(rank.config, "train", **train)
    plain = changed(
        rank.config,
        "train",
        **once,
        max_tokens_per_microbatch=batch.num_tokens,
        recompute="none",
        offload=(),
        optimizer_cpu_offload=False,
    )

    def build(layout: Layout, is_plain: bool) -> Learner:
        local = replace(rank, layout=layout, config=plain if is_plain else config)
        trainer = make_trainer(local)
        if has_objective:
            return make_learner(local, trainer, make_objective(config))
        return PolicyLearner(trainer, SUPERVISED)

    folder = config.run_dir
    names = json.loads((folder / "layouts.json").read_text())
    rows = check_layouts(names, batch, build, world=rank.env.world_size, rank=rank.env.rank)
    if rank.env.is_main:
        (folder / "check.json").write_text(json.dumps(rows))


def layout_batch(rank: RankContext, *, has_objective: bool) -> TrainBatch:
    """Returns the rows to compare layouts on, at least two per rank."""
    config = rank.config
    prompts = make_prompts(rank).take(2 * max(CHECKED_ROWS // 2, rank.env.world_size))
    if config.stage_spec.learns == "answers":
        return with_rewards(supervised_batch(rank.tokenizer, prompts))
    if has_objective:  # two samples per prompt
        prompts = sorted(2 * prompts[::2], key=lambda prompt: prompt.prompt_id)
    rows = prompt_rows(prompts, num_tokens=RANDOM_TOKENS, vocab=rank.shape.vocab)
    batch = with_rewards(rows)
    if not has_objective:
        return batch
    batch = replace(batch, temperature=config.rollout.temperature)
    if config.rollout.router_replay == "none":
        return batch
    return replace(batch, choices=random_routes(rank.shape, batch))
