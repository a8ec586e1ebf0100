"""Reward models on a real trainer: micro-batches, folders that transformers can load, and a ranking that is learned."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, make_batch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist"))
from trainer_cases import save_model

from megarl.algorithms.objective import Objective
from megarl.commands.random_model import create_model
from megarl.config.schema import Config, Create
from megarl.data.preferences import preference_batch, step_batch
from megarl.data.tasks import ranked_tokens
from megarl.data.tokenizer import TokenIds, load_tokenizer, pad_token
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.run.checkpoints import export
from megarl.run.context import RankContext
from megarl.run.models import make_learner, make_trainer
from megarl.stages.reward_model import Rankings, Steps, held_out_accuracy
from megarl.trainer.actor_critic import ActorCritic
from megarl.trainer.heads import RewardHead, ValueHead, load_head
from megarl.trainer.trainer import Gradients, Trainer
from megarl.types import (
    MicrobatchPlan,
    PreferenceBatch,
    Prompt,
    StepBatch,
    TokenBatch,
    UpdateReport,
)

pytestmark = pytest.mark.usefixtures("one_rank")
LONG = pytest.mark.long
TOKENIZER = TokenIds((1,), 67)


def prompts(count: int, responses: int, *, split: Any = "train", seed: int = 0) -> list[Prompt]:
    rows = ranked_tokens(split=split, vocab=67, size=count, responses=responses, seed=seed)
    return [
        Prompt(n, TOKENIZER.encode_prompt(row["prompt"], None), row["prompt"], None, row)
        for n, row in enumerate(rows)
    ]


def with_random_head(trainer: Trainer) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.parameters_by_name().items():
        if name.startswith("value_head"):
            parameter.data.normal_(generator=generator)
    return trainer


def in_pairs(batch: PreferenceBatch) -> PreferenceBatch:
    """Every pair as a group of its own: its two rows, again and again."""
    lengths, rows = batch.cu_seqlens.diff().tolist(), batch.pairs.flatten().tolist()
    flat = {
        name: torch.cat([getattr(batch, name).split(lengths)[row] for row in rows])
        for name in ("tokens", "labels", "mask")
    }
    cu_seqlens = torch.tensor([0, *(lengths[row] for row in rows)]).cumsum(0)
    index = torch.arange(len(rows))
    return replace(batch, **flat, cu_seqlens=cu_seqlens, group=index // 2, pairs=index.view(-1, 2))


@pytest.mark.parametrize(
    "aggregate", ["last", *(pytest.param(name, marks=LONG) for name in ("max", "weighted"))]
)
def test_36_pairs_of_a_prompt_are_36_microbatches(tmp_path: Path, aggregate: str) -> None:
    ranking = preference_batch(TOKENIZER, prompts(1, 9))
    pairs = in_pairs(ranking)
    assert len(ranking.pairs) == 36 and sorted(ranking.pairs.tolist()) == [
        list(pair) for pair in combinations(range(9), 2)
    ]
    head = RewardHead(kind="token", aggregate=aggregate)

    def update(
        batch: PreferenceBatch, max_tokens: int, num_microbatches: int
    ) -> tuple[UpdateReport, Any, list]:
        trainer = with_random_head(build(tmp_path, head=head, max_tokens_per_microbatch=max_tokens))
        scores, gradients, backward = (
            head.scores(trainer.forward(batch), batch),
            [],
            trainer.backward,
        )

        def watched(
            batch: TokenBatch, plan: MicrobatchPlan, *args: Any, **options: Any
        ) -> Gradients:
            assert len(plan.rows[0][0]) == num_microbatches
            left = backward(batch, plan, *args, **options)
            gradients.extend(
                parameter.main_grad.clone() for parameter in trainer.parameters_by_name().values()
            )
            return left

        trainer.backward = watched
        report = Rankings(trainer, head, centre=0.01).update(batch).updates[0]
        trainer.close()
        return report, scores, gradients

    found = update(ranking, 10_000, 1), update(pairs, 20, 36)
    (one, scores, gradients), (many, pair_scores, pair_gradients) = found
    torch.testing.assert_close(scores[ranking.pairs.flatten()], pair_scores, rtol=1e-5, atol=1e-6)
    assert one.loss == pytest.approx(many.loss, rel=1e-6) and one.grad_norm > 1e-3
    assert one.metrics == pytest.approx(many.metrics, rel=1e-5)
    assert (
        len(gradients) == len(pair_gradients)
        and sum(bool(gradient.any()) for gradient in gradients) > 10
    )
    for here, there in zip(gradients, pair_gradients, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


def test_a_skipped_update_needs_no_pairs(tmp_path: Path) -> None:
    tied = [replace(prompt, extra={**prompt.extra, "ranks": [1, 1]}) for prompt in prompts(2, 2)]
    trainer, head = build(tmp_path, head=RewardHead()), RewardHead()
    report = Rankings(trainer, head).update(preference_batch(TOKENIZER, tied)).updates[0]
    assert report.skipped
    trainer.close()


@LONG
def test_a_held_out_ranking_is_recovered(tmp_path: Path) -> None:
    held_out = preference_batch(TOKENIZER, prompts(32, 4, split="eval"))
    head = RewardHead()
    trainer = build(tmp_path, head=head, lr=4e-3, max_tokens_per_microbatch=4096)
    model, chance = Rankings(trainer, head), None
    for step in range(60):
        chance = chance or held_out_accuracy(model, held_out)["accuracy"]
        model.update(preference_batch(TOKENIZER, prompts(24, 4, seed=step)))
    result = held_out_accuracy(model, held_out)
    scores = head.scores(trainer.forward(held_out), held_out)
    trainer.close()
    whole = [
        bool((scores[start : start + 4].diff() < 0).all()) for start in range(0, len(scores), 4)
    ]
    print(chance, result, sum(whole) / len(whole))
    assert chance == 0.5 and result["accuracy"] > 0.9 and result["size"] == 32
    assert result["accuracy/low"] < result["accuracy"] < result["accuracy/high"]
    assert sum(whole) / len(whole) > 0.6, "1 / 24 by chance"


# --- folders ------------------------------------------------------------------------------------------------------


def rank_of(folder: Path, runs: Path, **sections: Any) -> RankContext:
    sections |= {
        "train": {"dtype": "fp32"},
        "checkpoint": {"export_hf": "end"},
        "run": {"dir": str(runs)},
    }
    return RankContext.of(
        Config.model_validate({"model": {"path": str(folder)}, **sections}),
        Env.read(),
        pick_device(0),
    )


def exported(model: str, folder: Path, head: ValueHead, batch: TokenBatch) -> tuple[Path, Any]:
    """The folder that a run with a random head exports, and what the trainer computes of `batch`."""
    rank = rank_of(save_model(model, folder), folder / "runs")
    trainer = with_random_head(make_trainer(rank, head=head))
    outputs = trainer.forward(batch)
    export(rank, trainer)
    trainer.close()
    return folder / "runs" / "run" / "hf", outputs


def padded(batch: TokenBatch, pad: int) -> torch.Tensor:
    rows = batch.tokens.split(batch.cu_seqlens.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(name, marks=LONG) for name in ("qwen3", "qwen3_moe"))]
)
def test_transformers_scores_the_exported_folder(tmp_path: Path, model: str) -> None:
    from transformers import AutoModelForSequenceClassification

    batch, head = make_batch(num_rows=6), RewardHead()
    batch.tokens[batch.tokens == 66] = 65  # the token that pads
    folder, outputs = exported(model, tmp_path, head, batch)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    values = json.loads((folder / "config.json").read_text())
    assert (theirs.config.num_labels, theirs.config.pad_token_id) == (1, values["pad_token_id"])
    assert (
        values["architectures"][0].endswith("ForSequenceClassification")
        and theirs.score.weight.any()
    )
    with torch.no_grad():
        expected = theirs(padded(batch, values["pad_token_id"])).logits[:, 0]
    scores = head.scores(outputs, batch)
    print(model, float((scores - expected).abs().max()))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    rank = rank_of(folder, tmp_path / "again")
    assert load_head(folder) == head
    trainer = make_trainer(rank, head=load_head(folder))
    assert torch.equal(head.scores(trainer.forward(batch), batch), scores), (
        "and a run goes on from it"
    )
    trainer.close()
    critic = make_trainer(rank, head=ValueHead())
    parameters = critic.parameters_by_name()
    assert (
        torch.equal(parameters["value_head.weight"], theirs.score.weight)
        and not parameters["value_head.bias"].any()
    )
    critic.close()


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3_moe", marks=LONG)])
def test_a_critic_begins_as_the_reward_model_that_it_is_given(tmp_path: Path, model: str) -> None:
    """Trunk and head, bit for bit; not the policy's, from which `critic.model: null` begins."""
    policy, batch, head = save_model(model, tmp_path), make_batch(num_rows=4), RewardHead()
    rank = rank_of(policy, tmp_path / "runs")
    rewarding = with_random_head(make_trainer(rank, head=head))
    for parameter in rewarding.parameters_by_name().values():
        parameter.data.mul_(1.125)
    expected = {
        name: parameter.detach().clone()
        for name, parameter in rewarding.parameters_by_name().items()
    }
    scores = head.scores(rewarding.forward(batch), batch)
    export(rank, rewarding)
    rewarding.close()

    critic = {"model": str(tmp_path / "runs" / "run" / "hf"), "bootstrap_truncated": True}
    rank = rank_of(policy, tmp_path / "ppo", algorithm={"advantage": "gae"}, critic=critic)
    learner = make_learner(
        rank, make_trainer(rank), Objective(rank.config.algorithm, bootstrap_truncated=True)
    )
    assert isinstance(learner, ActorCritic)
    found = dict(learner.critic.parameters_by_name())
    assert not found.pop("value_head.bias").any(), "which a sequence classifier lacks"
    assert found.keys() == expected.keys() and len(found) > 10
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    values_T = learner.score(batch).old_values
    assert values_T is not None and torch.allclose(
        values_T[batch.cu_seqlens[1:] - 1], scores, rtol=1e-6
    )
    own = learner.actor.trainer.parameters_by_name()
    shared = own.keys() & expected.keys()
    assert len(shared) > 10 and not any(torch.equal(own[name], expected[name]) for name in shared)
    learner.critic.close()
    learner.actor.trainer.close()


WEIGHTED = RewardHead(kind="token", aggregate="weighted")


@pytest.mark.parametrize(
    "head", [RewardHead(kind="process"), pytest.param(WEIGHTED, marks=LONG)], ids=str
)
def test_transformers_scores_every_token(tmp_path: Path, head: RewardHead) -> None:
    from transformers import AutoModelForTokenClassification

    batch = make_batch(num_rows=6)
    folder, outputs = exported(
        "qwen3_untied" if head.kind == "process" else "qwen3", tmp_path, head, batch
    )
    theirs = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    is_read, lengths = head.positions(batch), batch.cu_seqlens.diff().tolist()
    with torch.no_grad():
        logits = torch.cat([theirs(row[None]).logits[0] for row in batch.tokens.split(lengths)])
    assert logits.shape[1] == head.outputs == len(head.fields)
    for name, expected in zip(head.fields, logits.T, strict=True):
        torch.testing.assert_close(
            getattr(outputs, name), torch.where(is_read, expected, 0.0), rtol=0, atol=1e-5
        )
    assert load_head(folder) == head
    config = json.loads((folder / "config.json").read_text())
    del config["megarl_reward_head"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(folder) == RewardHead(kind="process"), "another's token classifier"


def test_folders_without_a_fitting_head_are_refused(tmp_path: Path) -> None:
    policy = save_model("qwen3", tmp_path)
    with pytest.raises(ValueError, match="is a Qwen3ForCausalLM, not a reward model"):
        load_head(policy)
    with pytest.raises(
        ValueError, match=r"/none has no config\.json; name the folder of a reward model"
    ):
        load_head(tmp_path / "none")
    folder, _ = exported("qwen3", tmp_path, WEIGHTED, make_batch(num_rows=2))
    with pytest.raises(
        ValueError, match=r"score.weight has shape \(2, \d+\), but config.json requires \(1, \d+\)"
    ):
        make_trainer(rank_of(folder, tmp_path / "again"), head=RewardHead())


def test_rows_are_never_padded_with_the_token_that_ends_them(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(create_model(Create(), tmp_path))
    inner = tokenizer.inner
    assert pad_token(tokenizer) == (inner.pad_token_id, inner.pad_token)
    inner.pad_token = inner.eos_token  # as in many models
    assert pad_token(tokenizer) == (inner.unk_token_id, inner.unk_token)
    inner.unk_token = inner.bos_token = None
    # as in Qwen2.5: no token of texts, which would become a special one
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    assert pad_token(tokenizer)[1] == "<|im_start|>"
    assert pad_token(TokenIds((66,), 67)) == (65, None)


# --- steps --------------------------------------------------------------------------------------------------------


def solutions(count: int, seed: int = 0) -> list[Prompt]:
    """A step is right if its last number is even."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        steps = torch.randint(4, 66, (3, 2), generator=draw).tolist()[: 1 + number % 3]
        extra = {
            "completions": [f"{a} {b}" for a, b in steps],
            "labels": [b % 2 == 0 for _, b in steps],
        }
        found.append(Prompt(number, (5, 6), "5 6", None, extra))
    return found


def test_steps_end_at_their_last_tokens() -> None:
    batch = step_batch(TOKENIZER, solutions(3), separator=" 66")
    assert batch.mask.nonzero().flatten().tolist() == [4, 5 + 4, 5 + 7, 13 + 4, 13 + 7, 13 + 10]
    assert (batch.tokens[batch.mask] == 66).all(), "the separator belongs to the step"
    labels = [label for prompt in solutions(3) for label in prompt.extra["labels"]]
    assert batch.is_right[batch.mask].tolist() == labels and not batch.is_right[~batch.mask].any()


@LONG
def test_right_steps_are_recognised(tmp_path: Path) -> None:
    trainer = build(
        tmp_path, head=RewardHead(kind="process"), lr=5e-3, max_tokens_per_microbatch=40
    )
    model, losses = Steps(trainer), []
    held_out: StepBatch = step_batch(TOKENIZER, solutions(30, seed=1000), separator="")
    for seed in range(40):
        losses.append(
            model.update(step_batch(TOKENIZER, solutions(30, seed=seed), separator=""))
            .updates[0]
            .loss
        )
    result = held_out_accuracy(model, held_out)
    print(losses[0], losses[-1], result)
    assert (
        losses[0] == pytest.approx(0.693147, abs=1e-5)
        and result["accuracy"] > 0.9
        and result["size"] == 30
    )
    trainer.close()


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"completions": ["1"], "labels": []},
        {"completions": ["1"], "labels": [2]},
        {"completions": ["1"], "labels": [[]]},
        {"completions": [""], "labels": [1]},
    ],
    ids=str,
)
def test_wrong_steps_are_named(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"problem 7 \('5 6'\) has completions=.*correct the row"):
        step_batch(TOKENIZER, [Prompt(7, (5, 6), "5 6", None, extra)], separator="")
