"""What is wrong with a config is said before anything starts, with the values and the remedy."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Collection
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from house_report import FIRST_WORD

from megarl.algorithms import aggregation, corrections, losses
from megarl.algorithms.advantages import PER_ROW, PER_TOKEN
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import SELECT
from megarl.config import estimators, validate
from megarl.config.load import parse_config, resolved_yaml
from megarl.config.presets import PRESETS
from megarl.config.random_model import hf_config
from megarl.config.reference import _section
from megarl.config.schema import Algorithm, Config, Create, Section
from megarl.config.train import check_train
from megarl.config.validate import check_config, model_shape
from megarl.models.registry import parse_model, read_model
from megarl.platform.env import Env, is_installed

ALONE = Env()
URL = "http://localhost:8000/v1"
DISTILL = {"algorithm": {"preset": "distill"}}
MIXTURE = [{"name": "jsonl:a.jsonl"}, {"name": "jsonl:b.jsonl"}]

SPLIT = {"launch": {"topology": "split"}}
EXPERTS = {"family": "qwen3_moe", "experts": 4}
ITERATIVE = {
    "stage": "iterative_grpo",
    "train": {"steps": 99},
    "rewards": [{"name": "model"}, {"name": "accuracy"}],
    "iterative": {"iterations": 3},
}


def made(sections: dict[str, Any] | None = None, **create: Any) -> Config:
    return parse_config({"model": {"create": create}, **(sections or {})})


def torchrun(world: int) -> Env:
    return Env(world_size=world, local_world_size=world, has_launcher=True)


def test_the_smallest_world_holds_the_layout() -> None:
    moe = {"family": "qwen3_moe", "experts": 4}
    job = check_config(
        made({"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 1}}, **moe), ALONE
    )
    assert (job.world, job.layout.dp.size, job.replicas, job.layout.ep.size) == (2, 1, 2, 2)
    job = check_config(
        made({"parallel": {"pipeline": 2}, "rollout": {"tensor": 4}}, heads=4, kv_heads=2), ALONE
    )
    assert (job.world, job.layout.dp.size, job.replicas) == (4, 2, 1)


def test_torchrun_sets_the_world() -> None:
    job = check_config(made({"parallel": {"tensor": 2}, "launch": {"processes": 2}}), torchrun(8))
    assert (job.world, job.layout.dp.size, job.rows, job.longest_row) == (8, 4, 32 * 8, 1024 + 256)


@pytest.mark.parametrize(
    ("sections", "create", "parts"),
    [
        ({"parallel": {"tensor": 3}}, {}, ["heads=4", "parallel.tensor=3", "1, 2, 4"]),
        ({"parallel": {"tensor": 4}}, {}, ["kv_heads=2", "parallel.tensor=4", "1, 2"]),
        (
            {"parallel": {"pipeline": 4}},
            {"layers": 3},
            ["layers=3", "pipeline x virtual_pipeline = 4 x 1"],
        ),
        (
            {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
            {"layers": 3},
            ["layers=3", "= 2 x 2 chunks"],
        ),
        (
            {"parallel": {"virtual_pipeline": 2}},
            {"layers": 4},
            ["virtual_pipeline=2", "pipeline to 2 or more"],
        ),
        ({"parallel": {"expert": 2}}, {}, ["parallel.expert=2", "no experts"]),
        (
            {"parallel": {"expert": 3}},
            {"family": "qwen3_moe", "experts": 4},
            ["experts=4", "parallel.expert=3"],
        ),
        (
            {"parallel": {"expert_tensor": 3}},
            {"family": "qwen3_moe", "experts": 4, "moe_intermediate": 32},
            ["moe_intermediate=32", "parallel.expert_tensor=3"],
        ),
        ({"rollout": {"tensor": 3}}, {}, ["heads=4", "rollout.tensor=3"]),
        (
            {"parallel": {"tensor": 2}, "launch": {"processes": 3}},
            {},
            ["3 processes (launch.processes", "multiple of 2"],
        ),
        (
            {"rollout": {"top_p": 0.9}},
            {},
            ["rollout.top_p=0.9", "not supported in training", "1.0"],
        ),
        ({"rollout": {"top_k": 5}}, {}, ["rollout.top_k=5"]),
        ({"rollout": {"min_p": 0.1}}, {}, ["rollout.min_p=0.1"]),
        ({"rollout": {"samples_per_prompt": 1}}, {}, ["samples_per_prompt=1", "grpo", "2 or more"]),
        ({"rollout": {"max_tokens": 4000}}, {}, ["1024 + 4000 = 5024", "max_position=4096"]),
        ({"rollout": {"max_model_len": 1000}}, {}, ["1280", "max_model_len=1000"]),
        ({"train": {"updates_per_step": 64}}, {}, ["updates_per_step=64", "prompts_per_step=32"]),
        ({"train": {"min_lr": 1.0}}, {}, ["min_lr=1.0", "lr=1e-06"]),
        (
            {"train": {"max_tokens_per_logprob_batch": 512}},
            {},
            ["max_tokens_per_logprob_batch=512 is below", "max_tokens_per_microbatch=16384"],
        ),
        (
            {
                "train": {"max_tokens_per_logprob_batch": 32768},
                "precision": {"fp8": {"recipe": "delayed", "emulate": True}},
            },
            {},
            ["max_tokens_per_logprob_batch=32768", "fp8.recipe=delayed", "blockwise"],
        ),
        ({"rewards": []}, {}, ["rewards is empty"]),
        ({"algorithm": {"advantage": "nope"}}, {}, ["algorithm.advantage='nope'", "grpo"]),
        ({"moe": {"aux_loss": 0.01}}, {}, ["moe.aux_loss=0.01", "qwen3", "no experts"]),
        (
            {"moe": {"bias_update_rate": 0.001}},
            {"family": "qwen3_moe", "experts": 4},
            ["moe.bias_update_rate=0.001", "qwen3_moe have no bias", "moe.aux_loss"],
        ),
        (
            {"rollout": {"replicas": 2}},
            {},
            ["rollout.replicas=2", "launch.topology=split", "remove it"],
        ),
        ({"launch": {"dashboard": True}}, {}, ["launch.dashboard=True", "launch.topology=split"]),
        ({"launch": {"max_restarts": 9}}, {}, ["launch.max_restarts=9", "launch.topology=split"]),
        (
            {"launch": {"fallback_layouts": [{"processes": 1}]}},
            {},
            ["launch.fallback_layouts=", "topology=split"],
        ),
        (
            {
                "launch": {
                    **SPLIT["launch"],
                    "fallback_layouts": [
                        {"processes": 2},
                        {"processes": 3, "parallel": {"tensor": 2}},
                    ],
                }
            },
            {},
            ["launch.fallback_layouts[1]: 3 processes (launch.processes", "multiple of 2"],
        ),
        (
            {"rollout": {"update_in_flight": False}},
            {},
            ["rollout.update_in_flight=False", "launch.topology=split"],
        ),
        (
            {**SPLIT, "stage": "best_of_n"},
            {},
            ["launch.topology=split", "not for stage=best_of_n", "colocated"],
        ),
        (
            {**SPLIT, "train": {"offload": ["optimizer"]}},
            {},
            ["train.offload=['optimizer']", "shares none; unset it"],
        ),
        (
            {**SPLIT, "rollout": {"sleep_level": 1}},
            {},
            ["rollout.sleep_level=1", "shares none; unset it"],
        ),
        (
            {**SPLIT, "rewards": [{"name": "model", "options": {"path": "rm"}}]},
            {},
            ["name='model' scores on the trainer's ranks", "serve-reward"],
        ),
        (
            {"rollout": {"data": 2, "expert": 2}},
            {},
            ["rollout.data=2", "(qwen3) has no experts", "a replica of rollout.tensor ranks each"],
        ),
        (
            {"rollout": {"data": 2}},
            EXPERTS,
            ["rollout.data=2", "set rollout.expert=2, or rollout.data=1"],
        ),
        (
            {"rollout": {"tensor": 2, "data": 2, "expert": 2}},
            EXPERTS,
            ["rollout.expert=2", "neither 1 nor rollout.tensor x data = 2 x 2 = 4", "expert=4"],
        ),
        (
            {"rollout": {"expert": 4}},
            EXPERTS,
            ["rollout.expert=4", "1 x 1 = 1", "change tensor or data"],
        ),
        ({"rollout": {"data": 3, "expert": 3}}, EXPERTS, ["experts=4", "rollout.expert=3"]),
        (
            {"launch": {"topology": "split", "processes_per_node": 4}, "rollout": {"tensor": 6}},
            {"heads": 6, "kv_heads": 6, "head_dim": 32},
            ["tensor x data = 6 x 1", "does not fill nodes of 4", "divide a node or be a multiple"],
        ),
        (
            {**SPLIT, "rollout": {"tensor": 3, "data": 4, "expert": 12}},
            {**EXPERTS, "experts": 12, "heads": 6, "kv_heads": 3, "head_dim": 32},
            ["3 x 4 ranks", "nodes of 8 (launch.processes_per_node; 8 if null)"],
        ),
        (
            {"rollout": {"data": 2, "expert": 2}, "launch": {"processes": 3}},
            EXPERTS,
            ["3 processes", "ranks of an engine replica = 2", "multiple of 2"],
        ),
        (
            {"rollout": {"router_replay": "engine"}},
            {},
            ["rollout.router_replay=engine", "qwen3", "no experts"],
        ),
        (
            {"rollout": {"router_replay": "trainer"}},
            {"family": "qwen3_moe", "experts": 4},
            ["router_replay=trainer", "one update per batch", "updates_per_step", "use engine"],
        ),
        (
            {"rollout": {"router_replay": "engine"}, "stage": "best_of_n"},
            {"family": "qwen3_moe", "experts": 4},
            ["router_replay=engine", "stage=best_of_n", "none"],
        ),
        (
            {"rollout": {"router_replay": "engine"}},
            {"family": "qwen3_moe", "experts": 4, "experts_per_token": 1},
            ["router_replay=engine", "experts_per_token=1", "2 or more"],
        ),
        (
            {"rollout": {"router_replay": "engine", "enforce_eager": False}},
            {"family": "qwen3_moe", "experts": 4},
            ["router_replay=engine", "enforce_eager=false", "CPU"],
        ),
        (
            {
                "rollout": {"router_replay": "engine"},
                "trainer": {"megatron_options": {"moe_router_fusion": True}},
            },
            {"family": "qwen3_moe", "experts": 4},
            ["router_replay=engine", "moe_router_fusion=true"],
        ),
        (
            {"launch": {"processes": 4, "processes_per_node": 3}},
            {},
            ["processes_per_node=3", "the 4 processes"],
        ),
        (
            {"model": {"revision": "v1"}},
            {},
            ["model.revision=v1", "not to model.create", "remove it"],
        ),
        (
            {"rewards": [{"name": "model"}]},
            {},
            ["name='model' needs options.path", "iterative_grpo"],
        ),
        (
            {
                "rewards": [{"name": "model", "options": {"path": "rm"}}],
                "rollout": {"sleep_level": 2},
            },
            {},
            ["rollout.sleep_level=2", "set 1"],
        ),
        ({**ITERATIVE, "train": {"steps": 100}}, {}, ["train.steps=100", "iterative.iterations=3"]),
        (
            {"telemetry": {"profile": {"steps": [2, 5]}}, "train": {"steps": 5}},
            {},
            ["telemetry.profile: steps=[2, 5]", "steps 0 to 4"],
        ),
        (
            {"telemetry": {"profile": {"steps": [2, 1]}}},
            {},
            ["telemetry.profile: steps=[2, 1]", "in this order"],
        ),
        (
            {"telemetry": {"profile": {"steps": [0, 1], "ranks": [0, 1]}}},
            {},
            ["telemetry.profile", "ranks=[0, 1]", "ranks 0 to 0"],
        ),
        (
            {"telemetry": {"profile": {"steps": [0, 1]}}, "launch": {"topology": "split"}},
            {},
            ["telemetry.profile", "launch.topology=colocated"],
        ),
        (
            {**ITERATIVE, "rewards": [{"name": "accuracy"}]},
            {},
            ["reward_model.train=true", "no `model`", "false"],
        ),
        (
            {**ITERATIVE, "rewards": [{"name": "model"}]},
            {},
            ["iterative.reward_model.labels must have a reward"],
        ),
        (
            {"rewards": [{"name": "model", "options": {"path": "no/where"}}]},
            {},
            ["rewards: name='model': path=no/where is not a folder", "hub id"],
        ),
        (
            {
                **ITERATIVE,
                "iterative": {"iterations": 3, "reward_model": {"labels": [{"name": "model"}]}},
            },
            {},
            ["labels must have a reward other than `model`"],
        ),
        (
            {
                **ITERATIVE,
                "iterative": {"iterations": 3, "reward_model": {"updates": 9, "prompts": 8}},
            },
            {},
            ["reward_model.updates=9", "prompts=8"],
        ),
        (
            {"reward_model": {"aggregate": "max"}},
            {},
            ["aggregate=max", "set reward_model.head=token"],
        ),
        (
            {"reward_model": {"process": True, "centre": 0.1}},
            {},
            ["process=true has no pairs", "remove", "centre"],
        ),
        (
            {"dpo": {"loss": "ipo", "label_smoothing": 0.1}},
            {},
            ["dpo.label_smoothing=0.1", "dpo.loss=ipo", "to 0"],
        ),
        (
            {"stage": "dpo", "dpo": {"reference": "previous"}},
            {},
            ["reference=previous", "stage: iterative_dpo"],
        ),
        (
            {"stage": "dpo", "train": {"epochs_per_batch": 2}},
            {},
            ["epochs_per_batch=2", "raise train.steps"],
        ),
        (
            {"stage": "best_of_n", "algorithm": {"loss": "gspo"}},
            {},
            ["algorithm.loss=gspo", "best_of_n; remove it"],
        ),
        (
            {"stage": "iterative_dpo", "algorithm": {"aggregation": "token-sum"}},
            {},
            ["algorithm.aggregation=token-sum", "iterative_dpo; remove it"],
        ),
        (
            {
                "stage": "iterative_dpo",
                "rollout": {"samples_per_prompt": 1},
                "algorithm": {"advantage": "reinforce"},
            },
            {},
            ["samples_per_prompt=1", "nothing to compare"],
        ),
        (
            {"stage": "best_of_n", "rollout": {"samples_per_prompt": 1}},
            {},
            ["samples_per_prompt=1", "nothing to compare; use 2"],
        ),
        (
            {"precision": {"fp8": {"recipe": "mxfp8"}}},
            {},
            ["recipe=mxfp8 needs a GPU", "precision.fp8.emulate=true"],
        ),
        (
            {"precision": {"fp8": {"params": True, "emulate": True}}, "train": {"dtype": "fp32"}},
            {},
            ["fp8.params=true", "train.dtype=fp32", "set it to bf16"],
        ),
        (
            {"precision": {"fp8": {"recipe": "tensorwise", "params": True, "emulate": True}}},
            {},
            ["recipe=tensorwise with params=true", "use blockwise"],
        ),
        (
            {"precision": {"fp8": {"recipe": "delayed", "emulate": True}}},
            {"family": "deepseek_v3", "experts": 4, "moe_intermediate": 32},
            ["recipe=delayed cannot be emulated for deepseek_v3", "use tensorwise"],
        ),
        (
            {"precision": {"fp8": {"first_last_bf16": 1, "emulate": True}}},
            {},
            ["first_last_bf16=1", "none of the 2 layers"],
        ),
        (
            {"rollout": {"quantization": "fp8"}, "train": {"dtype": "fp32"}},
            {},
            ["train.dtype=fp32", "=bf16"],
        ),
        (
            {"rollout": {"quantization": "fp8", "tensor": 2}, "train": {"dtype": "bf16"}},
            {},
            ["rollout.tensor=2", "of model.layers.*.self_attn", "choose rollout.tensor from 1"],
        ),
        (
            {"rollout": {"max_staleness": 1}},
            {},
            ["rollout.max_staleness=1", "launch.topology=split"],
        ),
        ({}, {"heads": 4, "kv_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({}, {"hidden": 66, "heads": 4}, ["hidden=66", "heads=4"]),
        ({}, {"family": "qwen3_moe"}, ["qwen3_moe", "experts=0"]),
        ({"checkpoint": {"resume": "nevr"}}, {}, ["checkpoint.resume=nevr", "never"]),
        ({"checkpoint": {"resume": "/"}}, {}, ["checkpoint.resume=/", "no metadata.json", "never"]),
        (
            {"algorithm": {"loss_options": {"clip_lo": 1}}},
            {},
            ["algorithm.loss_options.clip_lo", "mean clip_low?"],
        ),
        (
            {"algorithm": {"advantage_options": {"x": 1}}},
            {},
            ["advantage_options.x", "advantage=grpo", "singleton"],
        ),
        (
            {"algorithm": {"correction": "none", "correction_options": {"cap": 1}}},
            {},
            ["correction_options.cap", "correction=none", "takes none; remove it"],
        ),
        ({}, {"vocab": 3}, ["vocab=3", "at least"]),
        (
            {"algorithm": {"preset": "reinforce", "clip_low": 0.1}},
            {},
            ["clip_low=0.1", "loss=reinforce", "has none"],
        ),
        (
            {"algorithm": {"preset": "gspo", "dual_clip": 3}},
            {},
            ["dual_clip=3.0", "loss=gspo", "clip_high"],
        ),
        ({"algorithm": {"loss_options": {"clip_low": 1}}}, {}, ["write algorithm.clip_low"]),
        (
            {"algorithm": {"token_selection_options": {"share": 1}}},
            {},
            ["token_selection_options.share", "loss=ppo_clip", "none"],
        ),
        (
            {"algorithm": {"preset": "reinforce_pp", "loss": "gspo"}},
            {},
            ["loss=gspo", "reinforce_pp", "one per token"],
        ),
        (
            {"algorithm": {"advantage": "grpo_process", "kl": {"where": "reward", "coef": 0.1}}},
            {},
            ["grpo_process", "kl.where=loss"],
        ),
        (
            {"algorithm": {"use_rollout_logprobs": True}},
            {},
            ["use_rollout_logprobs=true", "correction=tis", "correction=none"],
        ),
        ({"algorithm": {"kl": {"target": 0.1}}}, {}, ["kl.target=0.1", "kl.coef"]),
        (
            {"critic": {"lr": 1.0e-4}},
            {},
            ["critic.lr=0.0001", "advantage=grpo has no critic", "preset=ppo"],
        ),
        ({"stage": "sft", "critic": {"clip": None}}, {}, ["critic.clip=None", "remove it"]),
        (
            {"algorithm": {"preset": "ppo"}, "critic": {"min_lr": 1.0}},
            {},
            ["critic.min_lr=1.0", "critic.lr=9e-06"],
        ),
        (
            {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 100}},
            {},
            ["=100 covers all train.steps=100"],
        ),
        (
            {"algorithm": {"preset": "ppo"}, "critic": {"model": "nope/nope"}},
            {},
            ["critic.model=nope/nope", "folder"],
        ),
        (
            {"algorithm": {"preset": "ppo", "loss": "gspo"}},
            {},
            ["loss=gspo", "advantage=gae", "one per token"],
        ),
        (
            {"task": {"name": "a.b:f", "mixture": MIXTURE}},
            {},
            ["task.name=a.b:f and task.mixture are both set"],
        ),
        (
            {"task": {"size": 3, "mixture": MIXTURE}},
            {},
            ["task.size=3 and task.mixture are both set"],
        ),
        ({"eval": {"size": 0}}, {}, ["eval.size=0 and eval.sets is empty"]),
        (
            {"stage": "sft", "train": {"epochs_per_batch": 2}},
            {},
            ["epochs_per_batch=2", "stage: sft is new"],
        ),
        (
            {"stage": "sft", "sft": {"patience": 2}},
            {},
            ["sft.patience=2", "eval.every=0; set eval.every"],
        ),
        (
            {"stage": "sft", "eval": {"every": 2, "size": 0, "sets": [{"name": "a"}]}},
            {},
            ["eval.every=2 with stage: sft", "set eval.size"],
        ),
        (
            {"algorithm": {"preset": "distill"}},
            {},
            ["distill_coef=1.0 needs a teacher", "set teacher.model"],
        ),
        (
            {"algorithm": {"preset": "distill", "distill_top_k": 70}, "teacher": {"url": URL}},
            {"vocab": 67},
            ["distill_top_k=70 exceeds the vocabulary of 67"],
        ),
        (
            {"algorithm": {"distill_top_k": 9}},
            {},
            ["distill_top_k=9 has no effect with distill_coef=0; set that"],
        ),
        (
            {"algorithm": {"preset": "distill", "distill_beta": 0.5}, "teacher": {"url": URL}},
            {},
            ["distill_beta=0.5 needs algorithm.distill_top_k"],
        ),
        (
            {"teacher": {"url": URL}},
            {},
            ["teacher is set, but nothing reads it", "algorithm.distill_coef"],
        ),
        (
            {"reference": {"url": URL}},
            {},
            ["reference is set, but nothing reads it", "algorithm.kl.coef"],
        ),
        (
            {"stage": "sft", **DISTILL, "teacher": {"url": URL}},
            {},
            ["nothing reads it", "in stage: rl"],
        ),
        (
            {**DISTILL, "teacher": {}},
            {},
            ["teacher.model=None and teacher.url=None: set one of them"],
        ),
        (
            {**DISTILL, "teacher": {"url": URL, "model": "x"}},
            {},
            ["teacher.model=x", "set one of them"],
        ),
        (
            {**DISTILL, "teacher": {"model": "no/where"}},
            {},
            ["teacher.model=no/where is not a folder"],
        ),
        (
            {**DISTILL, "teacher": {"url": URL}, "rollout": {"temperature": 0.7}},
            {},
            ["rollout.temperature=0.7", "at 1; use teacher.model"],
        ),
        (
            {
                "algorithm": {"distill_coef": 1.0, "filter_zero_std": True},
                "teacher": {"url": URL},
                "rewards": [],
            },
            {},
            ["filter_zero_std=true drops every group"],
        ),
        (
            {"algorithm": {"preset": "gspo", "distill_coef": 1.0}, "teacher": {"url": URL}},
            {},
            ["loss=gspo needs one advantage per response"],
        ),
        ({"eval": {"sets": [{"name": "a"}, {"name": "a"}]}}, {}, ["two sets named a; rename one"]),
        (
            {"eval": {"sets": [{"name": "a", "options": {"x": 1}}]}},
            {},
            ["a has options={'x': 1}, but no task"],
        ),
        (
            {"eval": {"sets": [{"name": "a", "samples": 4, "temperature": 0}]}},
            {},
            ["a draws samples=4 at temperature=0", "set samples=1, or a temperature"],
        ),
        ({"algorithm": {"kl": {"estimator": "k1", "coef": 0.1}}}, {}, ["k1 in the loss", "k3+"]),
        (
            {"algorithm": {"kl": {"where": "reward", "coef": 0.1, "against": "old"}}},
            {},
            ["kl.against=old", "kl.where=loss"],
        ),
        (
            {"algorithm": {"kl": {"coef": 0.1, "against": "old"}}},
            {},
            ["one update per batch", "train.epochs_per_batch"],
        ),
        (
            {"algorithm": {"kl": {"where": "reward", "importance_weighted": True}}},
            {},
            ["importance_weighted=true", "kl.where=loss"],
        ),
        ({"algorithm": {"reward_clip": [1, 0]}}, {}, ["reward_clip=[1.0, 0.0]"]),
        ({"algorithm": {"reward_clip_stage": "normalised"}}, {}, ["normalise_rewards=true"]),
        (
            {
                "algorithm": {
                    "filter_zero_std": True,
                    "normalise_rewards": True,
                    "reward_clip": [-1, 1],
                    "reward_clip_stage": "normalised",
                }
            },
            {},
            ["filter_zero_std=true", "choose raw"],
        ),
        (
            {"algorithm": {"overlong": {"buffer": 300}}},
            {},
            ["overlong.buffer=300", "max_tokens=256"],
        ),
    ],
)
def test_refusals(sections: dict[str, Any], create: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        check_config(made(sections, **create), ALONE)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def test_torchrun_world_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^3 processes .*WORLD_SIZE.* = 2; use a multiple of 2"):
        check_config(made({"parallel": {"tensor": 2}}), torchrun(3))


def test_a_dry_run_for_another_machine_has_its_gpus() -> None:
    config = made({"launch": {"gpu": "h100"}, "train": {"optimizer_cpu_offload": True}})
    assert check_config(config, ALONE, is_dry=True).gpus == 0
    with pytest.raises(ValueError, match="needs a GPU; remove it"):
        check_config(config, ALONE)


def test_an_engine_may_span_nodes() -> None:
    nodes = Env(world_size=8, local_world_size=2, has_launcher=True)
    for layout in ({"tensor": 4}, {"tensor": 2, "data": 2, "expert": 4}):
        assert check_config(made({"rollout": layout}, **EXPERTS), nodes).replicas == 2


def test_model_directories(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a directory"):
        model_shape(parse_config({"model": {"path": str(tmp_path / "nope")}}))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(
        ValueError, match="'gpt2' is not supported; supported: llama, qwen2, qwen3, qwen3_moe"
    ):
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(Create(hidden=32))))
    assert model_shape(parse_config({"model": {"path": str(tmp_path)}})).hidden == 32
    with pytest.raises(ValueError, match=r"are both set"):
        model_shape(parse_config({"model": {"path": str(tmp_path), "create": {}}}))
    with pytest.raises(ValueError, match=r"no model is set; set model\.path"):
        model_shape(Config())


GLM = hf_config(Create(family="glm4_moe", experts=4))
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "values", "parts"),
    [
        ("qwen3", {"hidden_size": None}, ["hidden_size=null", "integer of at least 1"]),
        ("qwen3", {"hidden_size": "big"}, ['hidden_size="big"', "an integer"]),
        ("qwen3", {"num_attention_heads": 0}, ["num_attention_heads=0", "at least 1"]),
        ("qwen3", {"num_hidden_layers": -2}, ["num_hidden_layers=-2", "at least 1"]),
        ("qwen3", {"vocab_size": True}, ["vocab_size=true"]),
        ("qwen3", {"rms_norm_eps": "small"}, ['rms_norm_eps="small"', "number above 0"]),
        ("qwen3", {"rope_parameters": [1]}, ["rope_parameters=[1]", "an object"]),
        ("qwen3", {"rope_parameters": {"rope_theta": -1}}, ["rope_parameters: rope_theta=-1"]),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "llama3"}},
            ["rope_parameters has no 'factor'"],
        ),
        ("qwen3", {"eos_token_id": "</s>"}, ['eos_token_id="</s>"', "token id"]),
        (
            "llama",
            {"hidden_size": 3, "head_dim": None},
            ["hidden_size=3", "num_attention_heads=4", "set head_dim"],
        ),
        ("qwen3_moe", MOE | {"num_experts": 0}, ["num_experts=0", "at least 1"]),
        (
            "qwen3",
            {"num_hidden_layers": 10**12},
            ["num_hidden_layers=1000000000000", "below 2**31"],
        ),
        (
            "qwen3",
            {"num_hidden_layers": 10**9},
            ["1000000000 layers", "at most 200000 are supported"],
        ),
        (
            "qwen3_moe",
            MOE | {"num_hidden_layers": 10**4, "num_experts": 10**4},
            ["10000 layers", "10000 experts"],
        ),
        (
            "glm4_moe",
            GLM | {"num_nextn_predict_layers": 10**9},
            ["1000000000 of multi-token prediction"],
        ),
        ("qwen3", {"vocab_size": 2**63}, [f"vocab_size={2**63}", "below 2**31"]),
        ("qwen3", {"vocab_size": 0}, ["vocab_size=0"]),
        ("qwen3", {"hidden_size": -1}, ["hidden_size=-1"]),
        ("qwen3", {"hidden_size": float("inf")}, ["hidden_size=Infinity"]),
        ("qwen3", {"num_attention_heads": 3}, ["num_attention_heads=3", "num_key_value_heads=2"]),
        ("qwen3", {"num_key_value_heads": 0}, ["num_key_value_heads=0"]),
        ("qwen3", {"head_dim": 0}, ["head_dim=0"]),
        ("qwen3", {"rms_norm_eps": float("nan")}, ["rms_norm_eps=NaN"]),
        ("qwen3", {"rope_parameters": None, "rope_theta": float("inf")}, ["rope_theta=Infinity"]),
        (
            "qwen3",
            {"rope_parameters": None, "rope_scaling": {"rope_type": "evil"}},
            ["rope_type='evil'"],
        ),
        ("qwen3", {"eos_token_id": [[1]]}, ["eos_token_id=[[1]]"]),
        ("qwen3", {"eos_token_id": ["x" * 5000]}, ["eos_token_id="]),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "awq"}},
            ['quant_method="awq"', "bf16 copy"],
        ),
        (
            "qwen3",
            {"quantization_config": {"quant_method": ["fp8"]}},
            ["quant_method=", "bf16 copy"],
        ),
        ("qwen3", {"quantization_config": 4}, ["quantization_config: 4 is invalid", "bf16 copy"]),
        (["qwen3"], {}, ["model_type=", "not supported"]),
        ({"a": 1}, {}, ["model_type=", "not supported"]),
        ("qwen3_moe", MOE | {"num_experts_per_tok": None}, ["num_experts_per_tok=null"]),
    ],
)
def test_a_config_json_is_refused_by_file_key_and_value(
    tmp_path: Path, family: Any, values: dict[str, Any], parts: list[str]
) -> None:
    raw = hf_config(Create(hidden=32)) | {"model_type": family} | values
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError) as caught:
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))
    for part in ["config.json", *parts]:
        assert part in str(caught.value), caught.value
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 150 + b"1" + b"}" * 150, b"\xff\xfe{", b"", b"{"]
)
def test_a_config_json_that_is_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"^.*config\.json is not JSON \(.*\); correct it, or choose another model$",
    ):
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))


def test_a_config_json_that_is_a_link_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"config\.json is not JSON") as caught:
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))
    assert "root" not in str(caught.value).partition("config.json")[2]


def test_the_code_of_a_model_is_not_imported(tmp_path: Path) -> None:
    raw = hf_config(Create(hidden=32)) | {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    assert model_shape(parse_config({"model": {"path": str(tmp_path)}})).hidden == 32


def test_a_model_of_a_billion_layers_is_refused_before_it_is_created() -> None:
    with pytest.raises(ValueError, match=r"1000000000 layers, .* are supported"):
        model_shape(parse_config({"model": {"create": {"layers": 10**9}}}))


def test_a_config_json_that_is_a_list_or_lacks_a_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json contains a list, not an object"):
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=r"config\.json has no 'hidden_size'"):
        model_shape(parse_config({"model": {"path": str(tmp_path)}}))


MISTRAL = hf_config(Create(hidden=32)) | {"model_type": "mistral"}


def bridged(folder: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> Config:
    """A family without a table, where both packages that stand in for one can be found; neither is imported."""
    for package in ("megatron/bridge", "transformer_engine"):
        (folder / "site" / package).mkdir(parents=True)
        (folder / "site" / package / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(folder / "site"))
    (folder / "config.json").write_text(json.dumps(MISTRAL | values))
    return parse_config({"model": {"path": str(folder)}})


def test_a_family_without_a_table_needs_megatron_bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    config = parse_config({"model": {"path": str(tmp_path)}})
    if not is_installed("transformer_engine"):
        with pytest.raises(
            ValueError, match=r"'mistral' is not supported; .* Add a table .*transformer_engine"
        ):
            model_shape(config)
    shape = model_shape(bridged(tmp_path, monkeypatch))
    assert (shape.bridge, shape.family, shape.hidden, shape.is_moe) == (
        tmp_path,
        "mistral",
        32,
        False,
    )
    with pytest.raises(ValueError, match="and use a folder with weights"):
        parse_model(MISTRAL, "model.create")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping=30.0 is not supported for mistral",
        ),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"vision_config": {"depth": 2}}, 'vision_config={"depth": 2}'),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=true"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4}'),
        ({"vocab_size": None}, "vocab_size=null"),
    ],
)
def test_what_megatron_bridge_cannot_stand_in_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError) as caught:
        model_shape(bridged(tmp_path, monkeypatch, **values))
    assert part in str(caught.value), caught.value


def test_routers_of_megatron_bridge_are_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bridged(tmp_path, monkeypatch, **MOE, logit_scale=1.0, head_dim=32)
    assert model_shape(config).experts == 4
    assert check_config(config, ALONE)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"aux_loss": 0.01})})
    with pytest.raises(ValueError, match=r"moe\.aux_loss=0\.01.*mistral.*Megatron-Bridge"):
        check_config(config, ALONE)


def test_a_checkpoint_to_resume_from_has_metadata(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    assert check_config(made({"checkpoint": {"resume": str(tmp_path)}}), ALONE)


def test_warnings_name_the_values() -> None:
    sections = {
        "train": {"max_tokens_per_microbatch": 64, "prompts_per_step": 1},
        "rollout": {"samples_per_prompt": 2},
    }
    warnings = check_config(made(sections | {"launch": {"processes": 4}}), ALONE).warnings
    assert any("1280 tokens" in text and "64" in text for text in warnings)
    assert any("2 rows for 4 data-parallel ranks" in text for text in warnings)
    assert check_config(made({"train": {"dtype": "fp32"}}), ALONE).warnings == ()
    unread = check_config(made({"sft": {"patience": 2}, "dpo": {"beta": 0.5}}), ALONE).warnings
    assert "sft.patience has no effect in stage: rl; it is for stage: sft" in unread
    assert "dpo.beta has no effect in stage: rl; it is for stage: dpo or iterative_dpo" in unread
    large = parse_config({"model": {"path": str(LARGE / "glm_4_5")}, "parallel": {"tensor": 8}})
    assert any("num_nextn_predict_layers=1" in text for text in check_config(large, ALONE).warnings)


def test_bf16_is_advised_against_on_a_cpu_without_its_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validate, "has_bf16_products", lambda: False)
    slow, fast = (
        check_config(made({"train": {"dtype": dtype}}), ALONE).warnings
        for dtype in ("bf16", "fp32")
    )
    assert any("train.dtype=fp32" in text for text in slow) and fast == ()


def test_a_group_of_one_is_legal_where_its_advantage_is_not_zero() -> None:
    one = {"rollout": {"samples_per_prompt": 1}}
    check_config(made(one | {"algorithm": {"advantage_options": {"singleton": "raw"}}}), ALONE)
    check_config(made(one | {"algorithm": {"preset": "remax"}}), ALONE)
    process = {"name": "process", "options": {"scorer": "json:loads"}}
    steps = {"algorithm": {"advantage": "grpo_process"}}
    assert not any(
        "grpo" in text
        for text in check_config(made(one | steps | {"rewards": [process]}), ALONE).warnings
    )
    with pytest.raises(ValueError, match="samples_per_prompt=1 with advantage=grpo_process"):
        check_config(made(one | steps), ALONE)
    assert any("equals grpo" in text for text in check_config(made(steps), ALONE).warnings)


def test_what_is_read_from_the_source_is_what_the_maths_take() -> None:
    """Names, options and defaults, without an import of torch."""
    assert list(aggregation.RULES) == list(estimators.AGGREGATIONS)
    assert list(KL) == list(estimators.KL)
    for known, rules, common in (
        (estimators.ADVANTAGES, PER_ROW | PER_TOKEN, {"whiten", "std", "eps"}),
        (estimators.LOSSES, losses.RULES, set()),
        (estimators.CORRECTIONS, corrections.RULES, set()),
    ):
        options = {name: options_of(rule) | common for name, rule in rules.items()}
        assert {name: set(each.options) for name, each in known.items()} == options
        for name, rule in rules.items():
            defaults = {key: known[name].options[key] for key in options_of(rule)}
            assert defaults == defaults_of(rule, defaults), name


def defaults_of(rule: Callable[..., Any], names: Collection[str]) -> dict[str, Any]:
    return {name: signature(rule).parameters[name].default for name in names}


def options_of(rule: Callable[..., Any]) -> set[str]:
    """The keywords of a rule, but for what the loop makes."""
    of = signature(rule).parameters.values()
    return {p.name for p in of if p.kind is p.KEYWORD_ONLY} - {"select_T"}


def test_selections_and_bounds_are_those_of_the_maths() -> None:
    bounds = {"clip_low", "clip_high", "dual_clip"}
    assert set(estimators.BOUND_NAMES) == bounds <= set(Algorithm.model_fields)
    selects = {name: options_of(rule) - {"generator", *bounds} for name, rule in SELECT.items()}
    assert {name: set(each.options) for name, each in estimators.SELECT.items()} == selects
    for loss, rule in losses.RULES.items():
        own = defaults_of(rule, options_of(rule) & bounds)
        assert estimators.BOUNDS[loss] == own, loss
    groups = {
        name
        for name, each in estimators.ADVANTAGES.items()
        if each.options.get("singleton") == "zero"
    }
    assert groups == {
        "rloo", "grpo", "dr_grpo", "opo", "gpg", "grpo_process",
    }  # fmt: skip
    assert Algorithm(advantage="gae").needs_critic and not Algorithm().needs_critic
    assert Algorithm(advantage="remax").needs_greedy_baseline


def descriptions(section: type[Section]) -> dict[str, str]:
    """Returns {field: the text under it}, from the source."""
    texts = {name: field.description or "" for name, field in section.model_fields.items()}
    for base in reversed(section.__mro__):
        if base is Section or not issubclass(base, Section):
            continue
        for node in ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8")).body:
            body = (
                node.body if isinstance(node, ast.ClassDef) and node.name == base.__name__ else ()
            )
            for field, text in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = getattr(text, "value", None)
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        texts[field.target.id] = inspect.cleandoc(value.value)
    return texts


def test_every_setting_is_described() -> None:
    """The one text of the reference and of errors: it begins with a noun or a verb."""
    sections = [Config]
    seen = set[type[Section]]()
    while sections:
        section = sections.pop()
        if section in seen:
            continue
        seen.add(section)
        texts = descriptions(section)
        for name, field in section.model_fields.items():
            text = texts[name]
            assert text and not FIRST_WORD.match(text), f"{section.__name__}.{name}: {text}"
            inner = _section(field.annotation)
            sections += [inner] if inner else []
    assert len(seen) > 25


def test_distillation_needs_no_reward() -> None:
    check_config(made({**DISTILL, "teacher": {"url": URL}, "rewards": []}), ALONE)
    check_config(made({"algorithm": {"preset": "rloo"}, "reference": {"url": URL}}), ALONE)


def test_the_divergence_of_whole_distributions_leaves_one_advantage_per_response(
    tmp_path: Path,
) -> None:
    config = made(
        {
            "algorithm": {"preset": "gspo", "distill_coef": 1.0, "distill_top_k": 8},
            "teacher": {"url": URL},
        }
    )
    check_config(config, ALONE)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(Create(hidden=32, vocab=50))))
    config = made(
        {
            "algorithm": {"preset": "distill", "distill_top_k": 51},
            "teacher": {"model": str(tmp_path)},
        }
    )
    with pytest.raises(ValueError, match="distill_top_k=51 exceeds the vocabulary of 50"):
        check_config(config, ALONE)


def test_a_critic_is_of_the_policys_vocabulary(tmp_path: Path) -> None:
    ppo = {"algorithm": {"preset": "ppo"}, "critic": {"model": str(tmp_path)}}
    for vocab in (99, 67):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(Create(hidden=32, vocab=vocab))))
        if vocab == 67:
            check_config(made(ppo, vocab=67), ALONE)
            continue
        with pytest.raises(ValueError, match=r"has a vocabulary of 99, but the policy's is 67"):
            check_config(made(ppo, vocab=67), ALONE)
    with pytest.raises(ValueError, match=r"heads=4 is not divisible by parallel.tensor=3"):
        check_config(
            made({**ppo, "parallel": {"tensor": 3}}, vocab=67, heads=3, kv_heads=3, head_dim=32),
            ALONE,
        )


def algorithm_of(**values: Any) -> Any:
    return made({"algorithm": values}).algorithm


LARGE = Path(__file__).resolve().parents[3] / "configs" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("kimi_k2", {"rope_interleave": False}, "rope_interleave=false"),
        ("kimi_k2", {"attention_bias": True}, "attention_bias=true"),
        ("deepseek_v3", {"topk_method": "greedy"}, 'topk_method="greedy"'),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "truncate=false"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            'fmt="e5m2"',
        ),
        ("llama_3_1_405b", {"mlp_bias": True}, "mlp_bias=true"),
        ("llama_3_1_405b", {"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        (
            "llama_3_1_405b",
            {"partial_rotary_factor": 0.5, "rope_scaling": None},
            "partial_rotary_factor=0.5",
        ),
        (
            "llama_3_1_405b",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type='linear'",
        ),
        (
            "llama_3_1_405b",
            {"rope_scaling": YARN | {"attention_factor": 1.2}},
            "attention_factor=1.2",
        ),
        ("qwen3_235b_a22b", {"use_sliding_window": True}, "use_sliding_window=true"),
        (
            "qwen3_235b_a22b",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types[1]",
        ),
        ("qwen3_235b_a22b", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        ("qwen3_235b_a22b", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_235b_a22b", {"rope_scaling": YARN | {"mscale": 0.5}}, "mscale and mscale_all_dim"),
        ("glm_4_5", {"rope_scaling": YARN}, "partial_rotary_factor=0.5 with rope_type=yarn"),
        ("gpt_oss_120b", {"layer_types": ["full_attention"]}, "layer_types[0]"),
        ("gpt_oss_120b", {"attention_bias": False}, "attention_bias=false"),
        ("gpt_oss_120b", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss_120b", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ("gpt_oss_120b", {"rope_scaling": None}, "rope_type='default'"),
    ],
)
def test_what_a_table_does_not_obey_is_refused_by_name(
    tmp_path: Path, model: str, values: dict[str, Any], said: str
) -> None:
    raw = json.loads((LARGE / model / "config.json").read_text())
    for given in ({}, values):  # as it is, it is taken
        (tmp_path / "config.json").write_text(json.dumps(raw | given))
        if not given:
            read_model(tmp_path)
    with pytest.raises(ValueError) as caught:
        read_model(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"]
)
def test_a_value_whose_default_differs_elsewhere_must_be_given(tmp_path: Path, key: str) -> None:
    raw = json.loads((LARGE / "deepseek_v3" / "config.json").read_text())
    del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "is_ambiguous"),
    [
        ({}, False),
        ({"mscale": 1.0}, False),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, False),
        ({"mscale": 0.7}, True),
        ({"mscale": 0.0}, True),
        ({"mscale_all_dim": 1.0}, True),
        ({"mscale": 0.0, "mscale_all_dim": 1.0}, True),
    ],
)
def test_yarns_factors_that_transformers_and_vllm_read_differently(
    tmp_path: Path, values: dict[str, float], is_ambiguous: bool
) -> None:
    """transformers takes both or neither; vLLM takes each, by default 1 and 0."""
    raw = json.loads((LARGE / "deepseek_v3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": YARN | values}))
    if not is_ambiguous:
        scaling = read_model(tmp_path).rope_scaling
        assert scaling["mscale"] == values.get("mscale", 1.0)
        return
    with pytest.raises(ValueError, match=r"mscale and mscale_all_dim are \("):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"num_experts_per_tok": 257}, {"topk_group": 9}, {"n_group": 7}],
)
def test_more_experts_per_token_than_experts(tmp_path: Path, values: dict[str, int]) -> None:
    raw = json.loads((LARGE / "deepseek_v3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | values))
    config = parse_config({"model": {"path": str(tmp_path)}})
    with pytest.raises(ValueError, match=r"do not fit 256 experts"):
        check_config(config, ALONE)


def test_biased_experts_are_not_split_and_sinks_are_not_spread_over_gpus() -> None:
    sections = {
        "model": {"path": str(LARGE / "gpt_oss_120b")},
        "parallel": {"tensor": 2, "expert_tensor": 2},
    }
    with pytest.raises(
        ValueError, match=r"parallel.expert_tensor=2, but the experts of gpt_oss have biases"
    ):
        check_config(parse_config(sections), ALONE)
    config = parse_config(sections | {"parallel": {"context": 2}})
    with pytest.raises(ValueError, match=r"parallel.context=2, but gpt_oss's attention sinks"):
        check_train(config, model_shape(config), 8)


def test_bounds_not_given_are_the_losss_own() -> None:
    """Another loss than the preset's brings its own; what is written acts."""
    gspo = algorithm_of(loss="gspo")
    assert (gspo.clip_low, gspo.clip_high, gspo.dual_clip) == (3e-4, 4e-4, None)
    assert algorithm_of(loss="gspo", clip_high=1e-3).clip_high == 1e-3
    assert algorithm_of(preset="gspo", clip_low=None).clip_low == 3e-4
    assert algorithm_of(preset="cispo", loss="ppo_clip").clip_high == 0.28
    assert algorithm_of(dual_clip=None).dual_clip is None and algorithm_of().dual_clip == 10
    assert algorithm_of(loss="reinforce").clip_low is None


def test_kl_in_the_reward_is_k1_unless_said() -> None:
    assert algorithm_of(kl={"where": "reward", "coef": 0.1}).kl.estimator == "k1"
    assert algorithm_of(kl={"where": "reward", "estimator": "k3"}).kl.estimator == "k3"
    assert algorithm_of(kl={"coef": 0.1}).kl.estimator == "k3+"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_print_as_plain_values_and_read_back(preset: str) -> None:
    config = made(
        {
            "algorithm": {"preset": preset},
            **({"teacher": {"url": URL}} if preset == "distill" else {}),
        }
    )
    check_config(config, ALONE)
    printed = yaml.safe_load(resolved_yaml(config))["algorithm"]
    assert {key: printed[key] for key in ("advantage", "loss", "aggregation", "correction")} == {
        key: PRESETS[preset][key] for key in ("advantage", "loss", "aggregation", "correction")
    }
    assert made({"algorithm": printed | {"preset": "grpo"}}).algorithm.model_copy(
        update={"preset": preset}
    ) == (config.algorithm), "the printed values alone say it all"


def test_an_optimizer_on_the_host_is_not_offloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.config.validate.count_gpus", lambda: 1)
    train = {"optimizer_cpu_offload": True, "offload": ["gradients"]}
    check_config(made({"train": train}), ALONE)
    with pytest.raises(
        ValueError, match=r"train.offload=\['optimizer'\] must not move it; remove optimizer"
    ):
        check_config(made({"train": {**train, "offload": ["optimizer"]}}), ALONE)


def test_the_split_topology_counts_trainers_and_engines_apart() -> None:
    config = made({**SPLIT, "rollout": {"tensor": 2, "replicas": 3}, "parallel": {"tensor": 2}})
    job = check_config(config, ALONE)
    assert (job.world, job.replicas) == (2, 3), "not the least multiple of both sides"
    assert check_config(made({**SPLIT, "rollout": {"tensor": 2}}), ALONE).world == 1, (
        "the engine's ranks are others"
    )
    with pytest.raises(ValueError, match="not by torchrun; run `megarl train`"):
        check_config(config, Env(0, 2, has_launcher=True))
    for command in ("eval", "parity", "sync"):
        with pytest.raises(
            ValueError, match=f"not for `megarl {command}`; set launch.topology=colocated"
        ):
            check_config(config, ALONE, command=command)
