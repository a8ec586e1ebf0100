"""Checks of the policy (parallel sizes, FP8, adapters) and of the models beside it. Errors list what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.names import ENGINE_STAGES
from megarl.config.schema import Config, Critic
from megarl.config.section import Fp8, Lora, refuse
from megarl.layout import Layout, Parallel, stage_layers
from megarl.models.fp8 import ROWS, fp8_format
from megarl.models.hub import model_folder
from megarl.models.lora import CONFIG, adapter_table, targets_of
from megarl.models.registry import megatron_table, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import Table
from megarl.platform.env import has_bf16_products
from megarl.platform.json_text import parse_json

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32
CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim: the only size its kernel supports
MAX_ENGINE_RANK = 512  # vLLM 0.32
UNSUPPORTED = (  # of PEFT: settings that change what an adapter computes, and lists of modules that are stored whole
    "use_dora", "use_rslora", "use_qalora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias",
    "layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "fan_in_fan_out",
)  # fmt: skip


def check_model(config: Config, shape: ModelShape) -> None:
    """Raises ValueError when the model cannot be split over the trainer's or the engine's layout."""
    sizes, virtual, engine = (
        config.parallel,
        config.parallel.virtual_pipeline,
        config.rollout.tensor,
    )
    for axis, ranks in (("parallel.tensor", sizes.tensor), ("rollout.tensor", engine)):
        _divides("heads", shape.heads, axis, ranks)
        _divides("shared experts' intermediate", shape.shared_intermediate, axis, ranks)
        if shape.dense_layers or not shape.is_moe:
            _divides("intermediate", shape.intermediate, axis, ranks)
    _divides("kv_heads", shape.kv_heads, "parallel.tensor", sizes.tensor)
    if shape.kv_heads % engine and engine % shape.kv_heads:  # vLLM replicates key-value heads
        heads = f"kv_heads={shape.kv_heads}"
        raise ValueError(
            f"rollout.tensor={engine} is neither a divisor nor a multiple of {heads}; choose one that is"
        )
    if virtual > 1 and sizes.pipeline == 1:
        raise ValueError(
            f"parallel.virtual_pipeline={virtual} needs pipelining; set it to 1, or pipeline to 2 or more"
        )
    stages = Parallel(pipeline=sizes.pipeline, virtual_pipeline=virtual)
    stage_layers(
        shape.layers, Layout.of(stages, sizes.pipeline, 0)
    )  # raises if a stage would be empty
    if shape.is_moe:
        _check_experts(config, shape)
        return
    experts = {"parallel.expert": sizes.expert, "parallel.expert_tensor": sizes.expert_tensor}
    for key, size in (experts | {"rollout.expert": config.rollout.expert}).items():
        if size > 1:
            raise ValueError(
                f"{key}={size}, but the model ({shape.family}) has no experts; set it to 1"
            )


def _check_experts(config: Config, shape: ModelShape) -> None:
    sizes, tensor, expert = config.parallel, config.rollout.tensor, config.rollout.expert
    _divides("experts", shape.experts, "parallel.expert", sizes.expert)
    _divides(
        "moe_intermediate", shape.moe_intermediate, "parallel.expert_tensor", sizes.expert_tensor
    )
    if expert == 1:
        _divides("moe_intermediate", shape.moe_intermediate, "rollout.tensor", tensor)
    _divides("experts", shape.experts, "rollout.expert", expert)
    router, chosen = shape.router, shape.experts_per_token
    problems = {  # each rank would add the bias to the sum
        f"parallel.expert_tensor={sizes.expert_tensor}, but the experts of {shape.family} have biases, which Megatron-"
        "Core supports only with 1; set it to 1, and use parallel.expert": shape.out_bias
        and sizes.expert_tensor > 1,
        f"rollout.expert={expert} is not a multiple of rollout.tensor={tensor}: vLLM distributes experts over all "
        f"ranks of a replica; use {-(-expert // tensor) * tensor}, or 1": expert > 1
        and expert % tensor,
        "norm_topk_prob=false with a sigmoid router is not supported by Megatron-Core; "
        "set it to true": router.score_function == "sigmoid"
        and not router.norm_topk_prob
        and chosen > 1,
        f"num_experts_per_tok={chosen}, topk_group={router.groups_per_token}, n_group={router.groups}: Megatron-Core "
        "scores a group by its best num_experts_per_tok / topk_group experts, but the model by its best 2; "
        "num_experts_per_tok must be 2 * topk_group": router.groups > 1
        and chosen != 2 * router.groups_per_token,
    }
    refuse(problems)


def check_router_replay(config: Config, shape: ModelShape, gpus: int) -> None:
    mode, train, stage, chosen = (
        config.rollout.router_replay,
        config.train,
        config.stage,
        shape.experts_per_token,
    )
    if mode == "none":
        return
    updates = train.updates_per_step * train.epochs_per_batch
    fuses = config.trainer.megatron_options.get("moe_router_fusion", False)
    problems = {
        f"but the model ({shape.family}) has no experts; set it to none": not shape.is_moe,
        f"which {shape.family} on Megatron-Bridge does not support; set it to none": shape.bridge,
        f"but experts_per_token={chosen}; it needs 2 or more, set it to none": chosen == 1,
        f"but stage={stage} has no policy gradient on samples; set it to none": stage
        not in ("rl", "iterative_grpo"),
        "but trainer.megatron_options.moe_router_fusion=true replays nothing; remove that": fuses,
        "but with rollout.enforce_eager=false nothing is captured on a CPU; remove that": (
            mode == "engine" and config.rollout.enforce_eager is False and not gpus
        ),
        "which has no effect with one update per batch, that records its own routes; raise train.updates_per_step or "
        "epochs_per_batch, or use engine": mode == "trainer" and updates == 1,
    }
    refuse(problems, f"rollout.router_replay={mode}, ")


def check_gpu_trainer(config: Config, shape: ModelShape) -> None:
    """Raises ValueError where Transformer Engine has no kernel; the attention used on a CPU does not need it."""
    if shape.sinks and config.parallel.context > 1:
        problem = f"{shape.family}'s attention sinks have no kernel for it on a GPU; set it to 1"
        raise ValueError(f"parallel.context={config.parallel.context}, but {problem}")


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for sizes that vLLM's CPU kernels reject only at start-up or in the first forward pass."""
    sizes = {"hidden": shape.hidden} if shape.is_moe else {}
    if shape.is_moe and shape.swiglu_limit:  # vLLM pads the others
        engine = config.rollout.tensor
        sizes[f"moe_intermediate / {engine}"] = shape.moe_intermediate // engine
    for name, size in sizes.items():
        if size % 32:
            raise ValueError(
                f"{name} = {size} is not a multiple of 32, as vLLM needs on a CPU; change it or use a GPU"
            )
    if (latent := shape.latent) is not None:
        if (latent.kv_lora_rank, latent.qk_rope_head_dim) != CPU_LATENT:
            raise ValueError(
                f"kv_lora_rank={latent.kv_lora_rank}, qk_rope_head_dim={latent.qk_rope_head_dim}, but vLLM's MLA on a "
                f"CPU supports only {CPU_LATENT[0]} and {CPU_LATENT[1]}; choose these, or run on a GPU"
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
            f"rollout.quantization=fp8 computes in bf16, not in train.dtype={dtype}; set train.dtype=bf16"
        )
    rows, _ = fp8_format(shape, rollout.tensor, rollout.expert).block
    if gpus and rows != ROWS[0]:
        raise ValueError(
            f"rollout.quantization=fp8 needs blocks of {rows} rows for {shape.family} with rollout.tensor="
            f"{rollout.tensor}, but a GPU's kernels take {ROWS[0]}; lower rollout.tensor, or set quantization=none"
        )
    if not gpus and not has_bf16_products():
        raise ValueError(
            "rollout.quantization=fp8 on a CPU needs one with AVX512-BF16 or AMX; set it to none"
        )


def is_in_fp8(layer: int, layers: int, fp8: Fp8) -> bool:
    """Whether the linear layers of `layer` of `layers` compute in FP8."""
    return fp8.first_last_bf16 <= layer < layers - fp8.first_last_bf16


def check_fp8_training(config: Config, shape: ModelShape, gpus: int) -> None:
    """Raises ValueError for what FP8 training lacks here."""
    if (fp8 := config.precision.fp8) is None:
        return
    where, ends, is_delayed = (
        f"precision.fp8.recipe={fp8.recipe}",
        fp8.first_last_bf16,
        fp8.recipe == "delayed",
    )
    first_last, dtype = f"precision.fp8.first_last_bf16={ends}", config.train.dtype
    problems = {
        f"{where} needs a GPU with FP8 and Transformer Engine, and this machine has none; set "
        "precision.fp8.emulate=true to round as it does": not gpus and not fp8.emulate,
        "precision.fp8.emulate=true is for a CPU, and this machine has GPUs; remove it": gpus
        and fp8.emulate,
        "precision.fp8.params=true is for emulation: Transformer Engine's parameters have not been tried; leave it at "
        "false": fp8.params and not fp8.emulate,
        f"precision.fp8.params=true needs main weights in fp32, not train.dtype={dtype}; set it to bf16": (
            fp8.params and dtype != "bf16"
        ),
        f"{where} with params=true cannot be emulated: forward and backward round weights by other blocks; use "
        "blockwise": fp8.params and fp8.recipe != "blockwise",
        f"{where} needs train.dtype=bf16 on a GPU, not {dtype}; set it": gpus and dtype != "bf16",
        f"{first_last} leaves none of the {shape.layers} layers in FP8; lower it": 2 * ends
        >= shape.layers,
        f"{where} cannot be emulated for {shape.family}: projections of latent attention do not save their scales; use "
        "tensorwise": fp8.emulate and is_delayed and shape.latent,
        f"{first_last} with recipe=delayed is not supported by Megatron-Core; set it to 0": ends
        and is_delayed,
    }
    refuse(problems)


def _divides(name: str, size: int, by: str, count: int) -> None:
    if size % count:
        choice = ", ".join(
            str(divisor) for divisor in range(1, min(size, 64) + 1) if size % divisor == 0
        )
        raise ValueError(
            f"{name}={size} is not divisible by {by}={count}; choose {by} from {choice}"
        )


def check_critic(config: Config, shape: ModelShape) -> None:
    critic, steps = config.critic, config.train.steps
    if not config.algorithm.needs_critic:
        remedy = f"advantage={config.algorithm.advantage} has no critic; remove it, or use algorithm.preset=ppo"
        return refuse(
            {
                f"critic.{key}={value}, but {remedy}": value != getattr(Critic(), key)
                for key, value in critic
            }
        )
    problems = {
        f"critic.min_lr={critic.min_lr} exceeds critic.lr={critic.lr}; lower it": critic.min_lr
        > critic.lr,
        f"critic.warmup_steps={critic.warmup_steps} covers all train.steps={steps}, so the policy is never updated; "
        "lower it": critic.warmup_steps >= steps > 0,
    }
    refuse(problems)
    if (
        critic.model is not None
        and (vocab := _beside(config, "critic.model", critic.model).vocab) != shape.vocab
    ):
        raise ValueError(
            f"critic.model={critic.model} has a vocabulary of {vocab}, but the policy's is {shape.vocab}; use a model "
            "of the same tokenizer"
        )


def _beside(config: Config, key: str, name: str) -> ModelShape:
    """The shape of a model in the policy's layout, which `key` names."""
    if not ((folder := model_folder(name)) / "config.json").is_file():
        raise ValueError(
            f"{key}={name} is not a folder with a config.json; set it to that, or the hub id, of a model"
        )
    check_model(config, other := read_model(folder))
    return other


def check_reward_model(config: Config, shape: ModelShape) -> None:
    options = config.reward_model
    if config.stage == "reward_model" and shape.bridge is not None:
        raise ValueError(
            f"stage=reward_model does not support {shape.family}, which has no table; use another model"
        )
    if options.head == "scalar" and options.aggregate != "last":
        problem = "needs the scores of all tokens; set reward_model.head=token"
        raise ValueError(f"reward_model.aggregate={options.aggregate} {problem}")
    if options.process and (options.head, options.centre, options.average) != (
        "scalar",
        0.0,
        "pairs",
    ):
        raise ValueError(
            "reward_model.process=true has no pairs; remove reward_model.head, centre and average"
        )


def check_frozen(config: Config, shape: ModelShape) -> None:
    """Raises ValueError for a teacher or reference model that is missing, unused, or cannot be asked."""
    algorithm, distill_coef, top_k = (
        config.algorithm,
        config.algorithm.distill_coef,
        config.algorithm.distill_top_k,
    )
    if top_k and not distill_coef:
        raise ValueError(
            f"algorithm.distill_top_k={top_k} has no effect with distill_coef=0; set that, e.g. to 1.0"
        )
    if algorithm.distill_beta != 1 and not top_k:
        raise ValueError(
            f"algorithm.distill_beta={algorithm.distill_beta} needs algorithm.distill_top_k, e.g. 64"
        )
    if distill_coef and config.teacher is None:
        raise ValueError(
            f"algorithm.distill_coef={distill_coef} needs a teacher; set teacher.model or teacher.url"
        )
    if (
        distill_coef
        and algorithm.filter_zero_std
        and not any(reward.weight for reward in config.rewards)
    ):
        raise ValueError(
            "algorithm.filter_zero_std=true drops every group if no reward has a weight; set it to false"
        )
    reads, vocab = (
        {"teacher": distill_coef > 0, "reference": algorithm.needs_reference},
        shape.vocab,
    )
    for key, coef in (("teacher", "distill_coef"), ("reference", "kl.coef")):
        if (part := getattr(config, key)) is None:
            continue
        if not reads[key] or config.stage not in ENGINE_STAGES:
            raise ValueError(
                f"{key} is set, but nothing reads it; remove it, or set algorithm.{coef} in stage: rl"
            )
        if (part.model is None) == (part.url is None):
            raise ValueError(f"{key}.model={part.model} and {key}.url={part.url}: set one of them")
        if part.url is not None and (temperature := config.rollout.temperature) != 1:
            raise ValueError(
                f"rollout.temperature={temperature}, but {key}.url gives log-probs at 1; use {key}.model"
            )
        if part.model is not None:
            vocab = min(vocab, _beside(config, f"{key}.model", part.model).vocab)
    if top_k > vocab:
        raise ValueError(
            f"algorithm.distill_top_k={top_k} exceeds the vocabulary of {vocab}; lower it"
        )


def check_iterative(config: Config) -> None:
    """Raises ValueError with the values and the remedy."""
    iterations, updates = config.iterative.iterations, config.iterative.reward_model
    model = next((reward for reward in config.rewards if reward.name == "model"), None)
    labels = updates.labels or tuple(reward for reward in config.rewards if reward.name != "model")
    is_iterative = config.stage == "iterative_grpo"
    is_trained = is_iterative and updates.train
    has_labels = any(reward.weight for reward in labels) and all(
        reward.name != "model" for reward in labels
    )
    problems = {
        "rollout.sleep_level=2 frees weights that the engine needs once the reward `model` has scored; set 1": (
            model and config.rollout.sleep_level == 2
        ),
        "rewards: name='model' needs options.path, the folder of a reward model; only stage: iterative_grpo, which "
        "trains it, can begin with the policy's weights": model
        and not is_trained
        and not model.options.get("path"),
        f"train.steps={config.train.steps} is not divisible by iterative.iterations={iterations}; all iterations have "
        "equally many steps": is_iterative and config.train.steps % iterations,
        "iterative.reward_model.train=true, but rewards has no `model`; "
        "add {name: model}, or set it to false": is_trained and not model,
        "iterative.reward_model.labels must have a reward other than `model`, with a weight, to rank the samples that "
        "the reward model learns from; e.g. labels: [{name: accuracy}]": is_trained
        and not has_labels,
        f"iterative.reward_model.updates={updates.updates} exceeds its prompts={updates.prompts}, and each update "
        "needs one; lower it": is_trained and updates.updates > updates.prompts,
    }
    refuse(problems)
    if model and isinstance(path := model.options.get("path"), str):
        _beside(config, "rewards: name='model': path", path)


def check_lora(config: Config, shape: ModelShape, *, has_engine: bool) -> None:
    """Raises ValueError with the values and the remedy."""
    lora, stage = config.lora, config.stage
    if lora is None:
        return
    quantization, bias_rate = config.rollout.quantization, config.moe.bias_update_rate
    has_critic = config.algorithm.needs_critic
    second = "algorithm.advantage=gae" if has_critic else f"stage: {stage}"
    problems = {
        f"lora is set, but {shape.family} has no table; use a model with one, or remove lora": shape.bridge,
        f"lora is set, but {second} trains a second head or model, which it does not adapt; remove lora": (
            has_critic or stage in ("reward_model", "iterative_grpo")
        ),
        f"lora.dropout={lora.dropout} makes the trainer's log-probs differ from the engine's; set it to 0": (
            lora.dropout and has_engine
        ),
        f"moe.bias_update_rate={bias_rate} changes the base model, which lora keeps; set it to 0": bias_rate,
        f"lora is set, but rollout.quantization={quantization} would round away what small adapters add to the "
        "weights; set rollout.quantization=none, or remove lora": quantization != "none"
        and has_engine,
    }
    refuse(problems)
    table = adapter_table(megatron_table(shape), lora.targets, lora.rank)
    if lora.sync == "adapter" and has_engine:
        _check_engine(config, lora, shape, table)
    if lora.path is not None:
        _check_folder(lora, lora.path, table)


def _check_engine(config: Config, lora: Lora, shape: ModelShape, table: Table) -> None:
    experts = ", ".join(targets_of(table.expert))
    problems = {
        "launch.topology=split moves whole weights": config.launch.topology == "split",
        f"lora.targets has {experts} of experts, which vLLM cannot adapt here": experts,
        "vLLM multiplies latent attention's projections in advance, without their adapters": shape.latent,
        f"lora.rank={lora.rank} exceeds vLLM's largest, {MAX_ENGINE_RANK}": lora.rank
        > MAX_ENGINE_RANK,
        "rollout.sleep_level=2 frees the engine's base weights, which are sent once": config.rollout.sleep_level
        == 2,
    }
    refuse(
        {
            f"lora.sync=adapter: {text}; set lora.sync=merged": is_wrong
            for text, is_wrong in problems.items()
        }
    )


def _check_folder(lora: Lora, path: str, table: Table) -> None:
    file = Path(path) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(
            f"lora.path={path} has no {CONFIG}; set it to the folder of a PEFT adapter"
        )
    try:
        values: Any = parse_json(file.read_bytes())
        alpha, rank = float(values["lora_alpha"]), int(values["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is not the config of a LoRA adapter ({error!r}); set lora.path to one"
        ) from None
    plain = dict.fromkeys(UNSUPPORTED) | {"bias": "none"}
    if unsupported := [
        f"{key}={values[key]}" for key, off in plain.items() if (values.get(key) or off) != off
    ]:
        raise ValueError(f"{file}: {unsupported[0]} is not supported; use a plain LoRA adapter")
    for key, ours, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if ours != theirs:
            raise ValueError(
                f"lora.{key}={ours:g}, but the adapter in lora.path={path} has {theirs:g}; set it to that"
            )
