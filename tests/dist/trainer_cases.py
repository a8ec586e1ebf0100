"""Tiny Hugging Face models, policies of them, batches, and plain transformers as the oracle of trainer tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.objective import Objective
from megarl.config.schema import Config
from megarl.layout import Layout
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.trainer.learner import PolicyLearner
from megarl.trainer.trainer import Trainer
from megarl.types import ScoredBatch, StepReport, TokenScores, TrainBatch

VOCAB = 67  # divisible by no tensor size
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that log-probs differ by whole units
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that rows of this length feel each of its three regimes
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_SIGMOID_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
_LATENT = {
    **_SIGMOID_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": _YARN,
    "num_nextn_predict_layers": 0,
}

MODELS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name -> config class of transformers and its arguments
    "llama": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": False, "rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_untied": ("Qwen3Config", {**_SIZES, "head_dim": 16, "tie_word_embeddings": False}),
    "qwen3_yarn": (
        "Qwen3Config",
        {
            **_SIZES,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {key: value for key, value in _YARN.items() if "mscale" not in key},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SIZES, **_MOE, "norm_topk_prob": True, "tie_word_embeddings": False},
    ),
    "qwen3_moe_16_experts": ("Qwen3MoeConfig", {**_SIZES, **_MOE, "num_experts": 16}),
    "qwen3_moe_unnormalised": (
        "Qwen3MoeConfig",
        {**_SIZES, **_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3_moe_32": (  # which vLLM takes on a CPU
        "Qwen3MoeConfig",
        {**_SIZES, **_MOE, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3": ("DeepseekV3Config", {**_SIZES, **_LATENT}),
    "deepseek_v3_direct": (  # queries projected directly, plain rope, one group, tied
        "DeepseekV3Config",
        {
            **_SIZES,
            **_LATENT,
            "q_lora_rank": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SIZES,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,  # less than most rows
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_SIZES,
            **_SIGMOID_ROUTED,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
            "num_nextn_predict_layers": 0,
        },
    ),
}

# Without a table of ours: Megatron-Bridge's (bridge_ranks.py)
MODELS |= {
    "mistral": (
        "MistralConfig",
        {**_SIZES, "head_dim": 32, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "hy_v3": (  # experts behind a dense layer, a sigmoid router with its correction, a shared expert
        "HYV3Config",
        {
            **_SIZES,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "router_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    "olmoe": ("OlmoeConfig", {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2Config", _SIZES),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **_SIZES,
            **_LATENT,
            "rope_parameters": _DEFAULT_ROPE,
            "rms_norm_eps": 1e-6,
        },  # of latents, always
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_SIZES,
            **_LATENT,
            "rope_parameters": _DEFAULT_ROPE,
            **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False},
        },
    ),
}


def save_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """A random model of MODELS in `folder`/`name`; its norms and biases are random too, or they would hide faults.

    `llama@5` is llama with five layers.
    """
    import transformers  # seconds to import: only where a model is made or asked

    torch.manual_seed(seed)
    base, _, layers = name.partition("@")
    kind, arguments = MODELS[base]
    config = getattr(transformers, kind)(**(arguments | {"num_hidden_layers": int(layers or 2)}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder / name)
    return folder / name


def load_model(path: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@dataclass(frozen=True)
class Policy:
    """A trainer of a saved model, and the learner and objective of its config."""

    config: Config
    folder: Path
    learner: PolicyLearner

    @classmethod
    def build(
        cls,
        config: Config,
        folder: Path,
        layout: Layout | None = None,
        *,
        shape: ModelShape | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> Policy:
        """`layout` None: one rank; `shape` None: as the model's config.json is read."""
        trainer = Trainer.build(
            shape or read_model(folder),
            layout or Layout.of(config.parallel.sizes, 1, 0),
            train=config.train,
            moe=config.moe,
            precision=config.precision,
            folder=folder,
            device=device,
            seed=config.run.seed,
            megatron_options=config.trainer.megatron_options,
        )
        objective = Objective(config.algorithm, config.rollout.max_tokens)
        return cls(config, folder, PolicyLearner(trainer, objective, seed=config.run.seed))

    @property
    def trainer(self) -> Trainer:
        return self.learner.trainer

    def logprobs(self, batch: TrainBatch) -> Tensor:
        logprobs_T = self.trainer.forward(batch).logprobs_T
        assert logprobs_T is not None
        return logprobs_T

    def score(self, batch: TrainBatch, logprobs: TokenScores | None = None) -> ScoredBatch:
        objective = self.learner.objective
        scores = logprobs or replace(self.learner.score(batch), old_logprobs=self.logprobs(batch))
        return objective.advantages(batch, scores, objective.initial_state())[0]

    def update(self, scored: ScoredBatch) -> StepReport:
        return self.learner.update(scored)


def random_batch(
    *, num_rows: int, seed: int = 0, temperature: float = 0.7, longest: int = 24
) -> TrainBatch:
    """Rows of different lengths, prompts masked, labels that follow the tokens; two rows a group."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    lengths = draw(4, longest, num_rows).tolist()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = draw(0, VOCAB, int(cu_seqlens[-1]))
    labels = torch.cat([tokens[1:], tokens[:1]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        mask[start : start + int(draw(0, 3, 1))] = False
        mask[end - 1], labels[end - 1] = False, 0
    total, last = tokens.numel(), cu_seqlens[1:] - 2
    rewards = torch.rand(num_rows, generator=generator)
    return TrainBatch(
        tokens=tokens,
        labels=labels,
        mask=mask,
        rollout_logprobs=torch.zeros(total),
        token_rewards=torch.zeros(total).index_put((last,), rewards),
        step_ends=torch.zeros(total, dtype=torch.bool),
        outcome_at=last,
        cu_seqlens=cu_seqlens,
        rewards=rewards,
        baseline=torch.zeros(num_rows),
        group=torch.arange(num_rows) // 2,
        prompt_id=torch.arange(num_rows) // 2,
        finish=torch.zeros(num_rows, dtype=torch.int64),
        versions=torch.zeros(tokens.numel(), dtype=torch.int32),
        temperature=temperature,
    )


def oracle_log_softmax(model: torch.nn.Module, batch: TrainBatch) -> torch.Tensor:
    """[T, vocab] of transformers at the batch's temperature, row by row."""
    spans = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    logits = [model(input_ids=batch.tokens[None, start:end]).logits[0] for start, end in spans]
    return torch.cat(logits).float().div(batch.temperature).log_softmax(-1)


def oracle_logprobs(model: torch.nn.Module, batch: TrainBatch) -> torch.Tensor:
    """[T], 0 where the mask is False."""
    of_labels = oracle_log_softmax(model, batch).gather(1, batch.labels[:, None])[:, 0]
    return torch.where(batch.mask, of_labels, 0.0)


@dataclass(frozen=True)
class Oracle:
    """What plain transformers and torch say of a batch."""

    logprobs: Tensor  # [T], 0 where the mask is False
    entropy: float  # mean over the mask
    steps: list[list[float]]  # [loss, gradient norm] of each


def ask(model: torch.nn.Module, scored: ScoredBatch, config: Config) -> Oracle:
    with torch.no_grad():
        log_softmax = oracle_log_softmax(model, scored)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)[scored.mask].mean()
    of_labels = log_softmax.gather(1, scored.labels[:, None])[:, 0].where(scored.mask, 0)
    steps = oracle_steps(model, replace(scored, old_logprobs=of_labels), config, num_steps=2)
    return Oracle(of_labels, float(entropy), steps)


def oracle_steps(
    model: torch.nn.Module, scored: ScoredBatch, config: Config, *, num_steps: int
) -> list[list[float]]:
    """[loss, gradient norm] of each step: the objective written out plainly, autograd, clipping, torch's AdamW."""
    train = config.train
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    steps = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        ratio = (oracle_logprobs(model, scored) - scored.old_logprobs).exp()
        clipped = ratio.clamp(1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high)
        loss_T = torch.maximum(-scored.advantages * ratio, -scored.advantages * clipped)
        loss_T = torch.where(
            scored.advantages < 0, loss_T.clamp(max=-scored.advantages * 10.0), loss_T
        )
        loss = loss_T[scored.mask].double().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad)
        optimizer.step()
        steps.append([float(loss), float(norm)])
    return steps
