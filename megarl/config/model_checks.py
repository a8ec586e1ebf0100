"""Checks of models: that parallel sizes divide the policy's, and of those beside it. Errors list what would work."""

from __future__ import annotations

from megarl.config.names import ENGINE_STAGES
from megarl.config.schema import Config, Critic
from megarl.config.section import Fp8
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.fp8 import ROWS, fp8_format
from megarl.models.hub import model_folder
from megarl.models.registry import read_model
from megarl.models.shape import ModelShape
from megarl.platform.env import has_bf16_products

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32
CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim: the only size its kernel supports


def check_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError when the model cannot be split over the trainer's or the engine's layout."""
    sizes, virtual, engine = config.parallel, config.parallel.virtual_pipeline, config.rollout.tensor
    for axis, ranks in (("parallel.tensor", sizes.tensor), ("rollout.tensor", engine)):
        _divides("heads", shape.heads, axis, ranks)
        _divides("shared experts' intermediate", shape.shared_intermediate, axis, ranks)
        if shape.dense_layers or not shape.is_moe:
            _divides("intermediate", shape.intermediate, axis, ranks)
    _divides("kv_heads", shape.kv_heads, "parallel.tensor", sizes.tensor)
    if shape.kv_heads % engine and engine % shape.kv_heads:  # vLLM replicates key-value heads
        raise ValueError(
            f"kv_heads={shape.kv_heads} and rollout.tensor={engine}: one must divide the other; "
            f"choose rollout.tensor from the divisors or multiples of {shape.kv_heads}"
        )
    if virtual > 1 and sizes.pipeline == 1:
        raise ValueError(f"parallel.virtual_pipeline={virtual} needs pipelining; set it to 1, or pipeline to 2 or more")
    stages = Parallel(pipeline=sizes.pipeline, virtual_pipeline=virtual)
    stage_layers(shape.layers, Layout.of(stages, sizes.pipeline, 0))  # raises if a stage would be empty
    if shape.is_moe:
        _check_experts(config, shape)
        return
    experts = {"parallel.expert": sizes.expert, "parallel.expert_tensor": sizes.expert_tensor}
    for key, size in (experts | {"rollout.expert": config.rollout.expert}).items():
        if size > 1:
            raise ValueError(f"{key}={size}, but the model ({shape.family}) has no experts; set it to 1")


def _check_experts(config: Config, shape: ModelShape) -> None:
    sizes, tensor, expert = config.parallel, config.rollout.tensor, config.rollout.expert
    _divides("experts", shape.experts, "parallel.expert", sizes.expert)
    _divides("moe_intermediate", shape.moe_intermediate, "parallel.expert_tensor", sizes.expert_tensor)
    if shape.out_bias and sizes.expert_tensor > 1:  # every rank would add the bias to the sum
        raise ValueError(
            f"parallel.expert_tensor={sizes.expert_tensor}, but the experts of {shape.family} have biases, which "
            "Megatron-Core supports only with 1; set it to 1, and use parallel.expert instead"
        )
    if expert == 1:
        _divides("moe_intermediate", shape.moe_intermediate, "rollout.tensor", tensor)
    _divides("experts", shape.experts, "rollout.expert", expert)
    if expert > 1 and expert % tensor:
        raise ValueError(
            f"rollout.expert={expert} is not a multiple of rollout.tensor={tensor}: vLLM distributes experts over all "
            f"ranks of a replica; use {-(-expert // tensor) * tensor}, or 1"
        )
    router, chosen = shape.router, shape.experts_per_token
    if router.score_function == "sigmoid" and not router.norm_topk_prob and chosen > 1:
        raise ValueError("norm_topk_prob=false with a sigmoid router is not supported by Megatron-Core; set it to true")
    if router.groups > 1 and chosen != 2 * router.groups_per_token:
        raise ValueError(
            f"num_experts_per_tok={chosen}, topk_group={router.groups_per_token}, n_group={router.groups}: "
            "Megatron-Core scores a group by its best num_experts_per_tok / topk_group experts, but the model by its "
            "best 2; num_experts_per_tok must be 2 * topk_group"
        )


def check_router_replay(config: Config, shape: ModelShape, gpus: int) -> None:
    mode, train = config.rollout.router_replay, config.train
    if mode == "none":
        return
    updates = train.updates_per_step * train.epochs_per_batch
    problems = {
        f"but the model ({shape.family}) has no experts; set it to none": not shape.is_moe,
        f"which {shape.family} on Megatron-Bridge does not support; set it to none": shape.bridge is not None,
        f"but experts_per_token={shape.experts_per_token}; it needs 2 or more, set it to none": (
            shape.experts_per_token == 1
        ),
        f"but stage={config.stage} has no policy gradient on samples; set it to none": (
            config.stage not in ("rl", "iterative_grpo")
        ),
        "but trainer.megatron_options.moe_router_fusion=true replays nothing; remove that": (
            config.trainer.megatron_options.get("moe_router_fusion", False)
        ),
        "but with rollout.enforce_eager=false nothing is captured on a CPU; remove that": (
            mode == "engine" and config.rollout.enforce_eager is False and not gpus
        ),
        "which has no effect with one update per batch, that records its own routes; raise train.updates_per_step or "
        "epochs_per_batch, or use engine": mode == "trainer" and updates == 1,
    }
    if problem := next((text for text, is_wrong in problems.items() if is_wrong), None):
        raise ValueError(f"rollout.router_replay={mode}, {problem}")


def check_gpu_trainer(config: Config, shape: ModelShape) -> None:
    """Raises ValueError where Transformer Engine has no kernel; the attention used on a CPU does not need it."""
    if shape.sinks and config.parallel.context > 1:
        raise ValueError(
            f"parallel.context={config.parallel.context}, but {shape.family}'s attention sinks are not supported with "
            "context parallelism on a GPU (Transformer Engine has no kernel for it); set it to 1"
        )


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for sizes that vLLM's CPU kernels reject only at start-up or in the first forward pass."""
    sizes = {"hidden": shape.hidden} if shape.is_moe else {}
    if shape.is_moe and shape.swiglu_limit:  # vLLM pads the others
        engine = config.rollout.tensor
        sizes[f"moe_intermediate / {engine}"] = shape.moe_intermediate // engine
    for name, size in sizes.items():
        if size % 32:
            raise ValueError(
                f"{name} = {size} is not a multiple of 32, which vLLM's CPU MoE kernel needs; change it, or use a GPU"
            )
    if shape.latent is not None:
        latent = (shape.latent.kv_lora_rank, shape.latent.qk_rope_head_dim)
        if latent != CPU_LATENT:
            raise ValueError(
                f"kv_lora_rank={latent[0]}, qk_rope_head_dim={latent[1]}, but vLLM's MLA on CPU supports "
                f"only {CPU_LATENT[0]} and {CPU_LATENT[1]}; choose these, or run on a GPU"
            )
    elif shape.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"head_dim={shape.head_dim}, but vLLM's attention on CPU supports {', '.join(map(str, CPU_HEAD_DIMS))}; "
            "choose one of them for model.create.head_dim, or run on a GPU"
        )


def check_fp8_rollout(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError where vLLM has no FP8 kernel, or would cut the blocks that share a scale."""
    rollout, dtype = config.rollout, config.train.dtype
    if rollout.quantization == "none":
        return
    if dtype != "bf16":
        raise ValueError(
            f"rollout.quantization=fp8 with train.dtype={dtype}: vLLM's FP8 kernels take bf16 activations; set "
            "train.dtype=bf16"
        )
    rows, _ = fp8_format(shape, rollout.tensor, rollout.expert).block
    if gpus and rows != ROWS[0]:
        raise ValueError(
            f"rollout.quantization=fp8 needs blocks of {rows} rows for {shape.family} with rollout.tensor="
            f"{rollout.tensor}, but a GPU's kernels take {ROWS[0]}; lower rollout.tensor, or set quantization=none"
        )
    if not gpus and not has_bf16_products():
        raise ValueError("rollout.quantization=fp8 on a CPU needs one with AVX512-BF16 or AMX; set it to none")


def is_in_fp8(layer: int, layers: int, fp8: Fp8) -> bool:
    """Whether the linear layers of `layer` of `layers` compute in FP8."""
    return fp8.first_last_bf16 <= layer < layers - fp8.first_last_bf16


def check_fp8_training(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError for what FP8 training lacks here."""
    if (fp8 := config.precision.fp8) is None:
        return
    where, ends = f"precision.fp8.recipe={fp8.recipe}", fp8.first_last_bf16
    problems = {
        f"{where} needs a GPU with FP8 and Transformer Engine, and this machine has none; set "
        "precision.fp8.emulate=true to round as it does": not gpus and not fp8.emulate,
        "precision.fp8.emulate=true is for a CPU, and this machine has GPUs; remove it": gpus and fp8.emulate,
        "precision.fp8.params=true is for emulation: Transformer Engine's parameters have not been tried; leave it at "
        "false": fp8.params and not fp8.emulate,
        f"precision.fp8.params=true needs main weights in fp32, not train.dtype={config.train.dtype}; set it to bf16": (
            fp8.params and config.train.dtype != "bf16"
        ),
        f"{where} with params=true cannot be emulated: forward and backward round weights by other blocks; use "
        "blockwise": fp8.params and fp8.recipe != "blockwise",
        f"{where} needs train.dtype=bf16 on a GPU, not {config.train.dtype}; set it": (
            gpus and config.train.dtype != "bf16"
        ),
        f"precision.fp8.first_last_bf16={ends} leaves none of the {shape.layers} layers in FP8; lower it": (
            2 * ends >= shape.layers
        ),
        f"precision.fp8.first_last_bf16={ends} with recipe=delayed is not supported by Megatron-Core; set it to 0": (
            ends and fp8.recipe == "delayed"
        ),
    }
    if problem := next((text for text, is_wrong in problems.items() if is_wrong), None):
        raise ValueError(problem)


def _divides(name: str, size: int, by: str, count: int) -> None:
    if size % count:
        divisors = [d for d in range(1, min(size, 64) + 1) if size % d == 0]
        raise ValueError(
            f"{name}={size} is not divisible by {by}={count}; choose {by} from {', '.join(map(str, divisors))}"
        )


def check_critic(config: Config, shape: ModelShape) -> None:
    critic, advantage = config.critic, config.algorithm.advantage
    if not config.algorithm.needs_critic:
        for key, value in critic:
            if value != getattr(Critic(), key):
                raise ValueError(
                    f"critic.{key}={value}, but algorithm.advantage={advantage} has no critic; remove it, or use "
                    "algorithm.preset=ppo"
                )
        return
    if critic.min_lr > critic.lr:
        raise ValueError(f"critic.min_lr={critic.min_lr} exceeds critic.lr={critic.lr}; lower it")
    if critic.warmup_steps >= config.train.steps > 0:
        raise ValueError(
            f"critic.warmup_steps={critic.warmup_steps} covers all train.steps={config.train.steps}, so the policy "
            "is never updated; lower it"
        )
    if critic.model is None:
        return
    other = _beside(config, "critic.model", critic.model)
    if other.vocab != shape.vocab:
        raise ValueError(
            f"critic.model={critic.model} has a vocabulary of {other.vocab}, but the policy's is {shape.vocab}; use a "
            "model of the same tokenizer"
        )


def _beside(config: Config, key: str, name: str) -> ModelShape:
    """The shape of a model in the policy's layout, which `key` names."""
    if not ((folder := model_folder(name)) / "config.json").is_file():
        raise ValueError(f"{key}={name} is not a folder with a config.json; set it to that, or the hub id, of a model")
    check_model(config, other := read_model(folder))
    return other


def check_reward_model(config: Config, shape: ModelShape) -> None:
    options = config.reward_model
    if config.stage == "reward_model" and shape.bridge is not None:
        raise ValueError(f"stage=reward_model does not support {shape.family}, which has no table; use another model")
    if options.head == "scalar" and options.aggregate != "last":
        text = f"reward_model.aggregate={options.aggregate} needs the scores of all tokens"
        raise ValueError(f"{text}; set reward_model.head=token")
    if options.process and (options.head, options.centre, options.average) != ("scalar", 0.0, "pairs"):
        raise ValueError("reward_model.process=true has no pairs; remove reward_model.head, centre and average")


def check_frozen(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for a teacher or reference model that is missing, unused, or cannot be asked."""
    algorithm, distill_coef, top_k = config.algorithm, config.algorithm.distill_coef, config.algorithm.distill_top_k
    if top_k and not distill_coef:
        raise ValueError(f"algorithm.distill_top_k={top_k} has no effect with distill_coef=0; set that, e.g. to 1.0")
    if algorithm.distill_beta != 1 and not top_k:
        raise ValueError(f"algorithm.distill_beta={algorithm.distill_beta} needs algorithm.distill_top_k, e.g. 64")
    if distill_coef and config.teacher is None:
        raise ValueError(f"algorithm.distill_coef={distill_coef} needs a teacher; set teacher.model or teacher.url")
    if distill_coef and algorithm.filter_zero_std and not any(reward.weight for reward in config.rewards):
        raise ValueError("algorithm.filter_zero_std=true drops every group if no reward has a weight; set it to false")
    reads, vocab = {"teacher": distill_coef > 0, "reference": algorithm.needs_reference}, shape.vocab
    for key, coef in (("teacher", "distill_coef"), ("reference", "kl.coef")):
        if (part := getattr(config, key)) is None:
            continue
        if not reads[key] or config.stage not in ENGINE_STAGES:
            raise ValueError(f"{key} is set, but nothing reads it; remove it, or set algorithm.{coef} in stage: rl")
        if (part.model is None) == (part.url is None):
            raise ValueError(f"{key}.model={part.model} and {key}.url={part.url}: set one of them")
        if part.url is not None and (temperature := config.rollout.temperature) != 1:
            raise ValueError(f"rollout.temperature={temperature}, but {key}.url gives log-probs at 1; use {key}.model")
        if part.model is not None:
            vocab = min(vocab, _beside(config, f"{key}.model", part.model).vocab)
    if top_k > vocab:
        raise ValueError(f"algorithm.distill_top_k={top_k} exceeds the vocabulary of {vocab}; lower it")


def check_iterative(config: Config) -> None:
    """Raises ValueError with the values and the remedy."""
    iterations, updates = config.iterative.iterations, config.iterative.reward_model
    model = next((reward for reward in config.rewards if reward.name == "model"), None)
    labels = updates.labels or tuple(reward for reward in config.rewards if reward.name != "model")
    is_iterative = config.stage == "iterative_grpo"
    is_trained = is_iterative and updates.train
    has_labels = any(reward.weight for reward in labels) and all(reward.name != "model" for reward in labels)
    problems = {
        "rollout.sleep_level=2 frees weights that the engine needs once the reward `model` has scored; set 1": (
            model and config.rollout.sleep_level == 2
        ),
        "rewards: name='model' needs options.path, the folder of a reward model; only stage: iterative_grpo, which "
        "trains it, can begin with the policy's weights": model and not is_trained and not model.options.get("path"),
        f"train.steps={config.train.steps} is not divisible by iterative.iterations={iterations}; all iterations have "
        "equally many steps": is_iterative and config.train.steps % iterations,
        "iterative.reward_model.train=true, but rewards has no `model`; add {name: model}, or set it to false": (
            is_trained and not model
        ),
        "iterative.reward_model.labels must have a reward other than `model`, with a weight, to rank the samples that "
        "the reward model learns from; e.g. labels: [{name: accuracy}]": is_trained and not has_labels,
        f"iterative.reward_model.updates={updates.updates} exceeds its prompts={updates.prompts}, and each update "
        "needs one; lower it": is_trained and updates.updates > updates.prompts,
    }
    if problem := next((text for text, is_wrong in problems.items() if is_wrong), None):
        raise ValueError(problem)
    if model and isinstance(path := model.options.get("path"), str):
        _beside(config, "rewards: name='model': path", path)
