"""One rank of a weight-sync launch: engines, trainers' shards in many layouts, faults. Run by test_sync.py.

    python sync_ranks.py FOLDER MODEL:ENGINE_TENSOR[:faults]...      (under RANK, WORLD_SIZE, ...)
    python sync_ranks.py FOLDER dies MODEL                           the last rank does, in the middle of a sync
    python sync_ranks.py FOLDER bf16 MODEL...                        engines of one rank, one sync each

The "trainer" is a plain holder of Megatron-named parameters, filled through the slices; the oracle is the
transformers model. Prints nothing; leaves FOLDER/rank_<r>.json with what it saw.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from echo_environment import Echo
from holder import holder, random_weights
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.layout import Fleet, Layout, Parallel
from megarl.models.engine import engine_format, engine_table, linear_shapes, with_scales
from megarl.models.formats import BlockFormat
from megarl.models.registry import fp32_tensors, hf_shapes, megatron_table, read_model
from megarl.models.shape import ModelShape
from megarl.models.shards import slices_of
from megarl.parity.gate import Measured, ParityChecks
from megarl.parity.statistics import Quantiles
from megarl.platform.env import Env
from megarl.rollout.sampling import check_version, sample_all
from megarl.rollout.vllm.engine import Engine
from megarl.types import CheckFailed, Prompt, Request, Sample, TokenBatch
from megarl.weights.encode.blocks import BlockEncoder
from megarl.weights.encode.quantize import dequantize, quantize
from megarl.weights.plan.plan import plan_transfers
from megarl.weights.sync.publish import Publisher, WeightFormat, WeightSender, plan_slices
from megarl.weights.sync.transports.collective import Collective

UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SIGMOID_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,  # which vLLM asks for
}  # fmt: skip
LATENT = {  # vLLM's CPU kernel takes a latent of 512 + 64
    "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 48,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 4, "topk_group": 2,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
    },
}  # fmt: skip
GLM = {
    "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True, "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
GPT_OSS = {
    "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
    "intermediate_size": 128,  # a multiple of 32 on each rank, or vLLM has no kernel
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
CONFIGS = {
    "qwen3": (transformers.Qwen3Config, TIED | {"vocab_size": 67, "num_key_value_heads": 2}),
    "qwen3_untied_kv1": (
        transformers.Qwen3Config,
        UNTIED | {"vocab_size": 70, "num_key_value_heads": 1},
    ),
    "qwen2": (transformers.Qwen2Config, UNTIED | {"vocab_size": 70, "num_key_value_heads": 2}),
    "llama": (transformers.LlamaConfig, UNTIED | {"vocab_size": 67, "num_key_value_heads": 4}),
    "mixtral": (
        transformers.MixtralConfig,
        UNTIED | {"vocab_size": 67, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        UNTIED | LATENT | SIGMOID_ROUTED | {"vocab_size": 67},
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, UNTIED | SIGMOID_ROUTED | GLM | {"vocab_size": 70}),
    "gpt_oss": (
        transformers.GptOssConfig,
        UNTIED | GPT_OSS | {"vocab_size": 70, "num_key_value_heads": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        UNTIED | EXPERTS | {"vocab_size": 67, "num_key_value_heads": 2},
    ),
}
SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1,
}  # fmt: skip
TP2, PP2, EP2 = Parallel(tensor=2), Parallel(pipeline=2), Parallel(expert=2)
TP2_PP2, PP2_VPP2 = Parallel(tensor=2, pipeline=2), Parallel(pipeline=2, virtual_pipeline=2)


def layouts(shape: ModelShape, world: int) -> list[Parallel]:
    """The trainer's, one after another."""
    found, splits = [Parallel()], shape.kv_heads > 1
    if world > 1:
        found += [TP2, PP2] if splits else [PP2]
        found += [PP2_VPP2] if shape.layers >= 4 else []
        found += [EP2] if shape.is_moe else []
    if world > 2 and splits:
        found += [TP2_PP2]
        found += (
            [Parallel(tensor=2, expert=2), Parallel(pipeline=2, expert=2)] if shape.is_moe else []
        )
    return found


class Reference:
    """The model's weights under HF names, and what transformers makes of a checkpoint that holds them."""

    def __init__(
        self, home: Path, shape: ModelShape, dtype: torch.dtype, fp8: BlockFormat | None = None
    ) -> None:
        self.fp8 = fp8  # transformers has what remains of the weights in that format
        self.shapes, self.dtype, self.fp32 = hf_shapes(shape), dtype, fp32_tensors(shape)
        self._shape = shape
        self.weights: dict[str, Tensor] = {}
        self._folder = home / f"reference_{dist.get_rank()}"
        self._folder.mkdir(exist_ok=True)
        shutil.copy(home / "config.json", self._folder)
        self.change(0)

    def change(self, seed: int) -> None:
        """New weights, the same on all ranks."""
        self.weights = random_weights(self.shapes, self.fp32, self.dtype, seed)
        save_file(
            self.engine_weights(), self._folder / "model.safetensors", metadata={"format": "pt"}
        )
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=self.dtype, output_loading_info=True
        )
        assert not any(
            info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        ), info
        self.model = model.eval()

    def engine_weights(self) -> dict[str, Tensor]:
        if self.fp8 is None:
            return self.weights
        names = linear_shapes(self._shape)
        return {
            name: dequantize(quantize(w, self.fp8), self.fp8, w.shape, w.dtype)
            if name in names
            else w
            for name, w in self.weights.items()
        }

    @torch.no_grad()
    def logprobs(self, tokens_NL: Tensor, temperature: float = 1.0) -> Tensor:
        scores = torch.log_softmax(self.model(tokens_NL).logits.float() / temperature, -1)
        return scores[:, :-1].gather(2, tokens_NL[:, 1:, None])[..., 0]

    def measure(self, batch: TokenBatch) -> Measured:
        rows = batch.tokens.split(batch.cu_seqlens.diff().tolist())
        logprobs_T = torch.cat(
            [torch.cat([self.logprobs(row[None])[0], torch.zeros(1)]) for row in rows]
        )
        floor = Quantiles(1.0, 1.0, 1.0, 1)  # a bound is set
        return Measured(logprobs_T[batch.mask], floor, floor)

    def errors(self, samples: Sequence[Sample], temperature: float) -> Tensor:
        rows = [
            (self.logprobs(sample.tokens[None], temperature)[0] - sample.rollout_logprobs[1:])[
                sample.trainable[1:]
            ]
            for sample in samples
        ]
        return torch.cat(rows).abs()

    def error(self, samples: Sequence[Sample], temperature: float) -> float:
        return float(self.errors(samples, temperature).max())


class Faulty(Collective):
    """A link that changes one bit of one byte of what the last rank receives; or the last rank dies in a round."""

    flips = True
    dies_in: int | None = None

    def start(self, outgoing, incoming):
        if self.rank == self.world - 1 and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                os._exit(9)
        wait = super().start(outgoing, incoming)

        def flip() -> None:
            wait()
            if self.flips and self.rank == self.world - 1 and incoming:
                next(iter(incoming.values())).view(torch.uint8)[-3] ^= 4

        return flip


class Launch:
    def __init__(
        self,
        folder: Path,
        name: str,
        tensor: int,
        job: str = "sync",
        dtype: torch.dtype = torch.float32,
        *,
        fp8: bool = False,
    ) -> None:
        self.rank, self.world, self.tensor = dist.get_rank(), dist.get_world_size(), tensor
        self.name = name
        home = folder / name
        if self.rank == 0:
            kind, config = CONFIGS[name]
            model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | config))
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(home)
        dist.barrier()
        self.shape = read_model(home)
        self.fp8 = engine_format("fp8", self.shape, tensor) if fp8 else None
        self.reference = Reference(home, self.shape, dtype, self.fp8)
        self.dtype, self.fp32 = dtype, fp32_tensors(self.shape)
        self.weights = WeightFormat(self.reference.shapes, dtype, self.fp32)
        if self.fp8:
            self.weights = self.weights.in_blocks(self.fp8, linear_shapes(self.shape))
        rollout = Rollout(tensor=tensor, max_tokens=16, max_model_len=256, cpu_kv_cache_gb=0.1)
        env = Env(self.rank, self.world, self.rank, self.world, job_id=job)
        self.engine = Engine.start(
            home,
            rollout,
            env,
            stop_token_ids=(1,),
            weights=self.weights,
        )

    def connect(
        self,
        parallel: Parallel,
        transport: Collective | None = None,
        drop: str | None = None,
        moved: str | None = None,  # the table puts it elsewhere
        is_atomic: bool = True,
    ) -> Publisher:
        fleet = Fleet(
            parallel,
            self.world,
            tensor=self.tensor,
            ranks_per_replica=self.tensor,
            replicas=self.world // self.tensor,
            ranks_per_node=self.world,
            is_split=False,
        )
        padded = -(-self.shape.vocab // (2 * parallel.tensor)) * 2 * parallel.tensor
        self.slices = slices_of(
            megatron_table(self.shape, spec="local", padded_vocab=padded),
            self.shape,
            fleet.trainer_layout(self.rank),
        )
        self.held = holder(self.slices, self.reference.weights)
        weights, fp8 = self.weights, self.fp8
        transport = transport or Collective()
        sender = WeightSender(self.slices, lambda: self.held)
        table = engine_table(self.shape, fp8)
        if fp8 is not None:
            sender = self.fp8_sender(padded, fleet, transport, fp8)
        if drop:
            plan = plan_slices(
                weights,
                transport.gather([part for part in self.slices if part.name != drop]),
                transport.gather(list(self.engine.receiver.slices)),
                ranks_per_replica=self.tensor,
                round_bytes=64 << 10,
            )
        else:
            options = {"itemsize": self.dtype.itemsize, "round_bytes": 64 << 10, "fmt": fp8}
            plan = plan_transfers(self.shape, fleet, padded_vocab=padded, spec="local", **options)
        table = slices_of(table, self.shape, fleet.engine_layout(self.rank))
        probe = ParityChecks(
            transport,
            self.reference.measure,
            [self.engine],
            torch.randint(
                0, self.shape.vocab, (4, 8), generator=torch.Generator().manual_seed(7)
            ).tolist(),
            max_tokens=16,
            max_diff=1e-4 if self.dtype == torch.float32 else math.inf,  # near-ties of two experts
            always=True,
        )
        return Publisher(
            plan,
            sender,
            self.engine.receiver,
            transport,
            weights,
            probe=probe,
            table=[replace(part, offset=part.offset + (part.name == moved)) for part in table],
            is_atomic=is_atomic,
        )

    def fp8_sender(
        self, padded: int, fleet: Fleet, transport: Collective, fp8: BlockFormat
    ) -> WeightSender:
        table = with_scales(
            megatron_table(self.shape, spec="local", padded_vocab=padded), fp8, is_whole=True
        )
        layouts = [fleet.trainer_layout(rank) for rank in range(self.world)]

        def reduce_max(values: Tensor, is_expert: bool) -> None:
            axes = ("pp", "ep", "edp") if is_expert else ("pp", "dp", "cp")
            keys = [[getattr(layout, axis).rank for axis in axes] for layout in layouts]
            found = transport.gather(values)
            peers = [found[rank] for rank in range(self.world) if keys[rank] == keys[self.rank]]
            values.copy_(torch.stack(peers).amax(0) if self.reduces else values)

        slices = slices_of(table, self.shape, layouts[self.rank])
        return BlockEncoder(slices, fp8, reduce_max).sender(lambda: self.held)

    reduces = True  # scales over ranks, as it should

    def requests(self, temperature: float = 0.7) -> list[Request]:
        prompts = [Prompt(i, (5, 6, 7, i), "") for i in range(4)] + [
            Prompt(9, tuple(range(2, 60)) * 3, "")
        ]
        return [Request(prompt, 0, 100 + prompt.prompt_id, temperature) for prompt in prompts]

    def sample(self, version: int, temperature: float = 0.7) -> list[Sample]:
        samples = sample_all(self.engine, self.requests(temperature))
        check_version(samples, version)
        return samples

    def change(self, seed: int) -> None:
        self.reference.change(seed)
        self.held = holder(self.slices, self.reference.weights)


def refused(call) -> str:
    try:
        call()
    except CheckFailed as error:
        return str(error)
    return ""


def syncs(launch: Launch) -> dict:
    """Every source layout, changed weights each time; then the same weights again."""
    seen: dict = {"errors": {}, "tokens": {}, "bytes": {}}
    seen["before"] = refused(lambda: launch.sample(0))
    version, publisher = 0, None
    for parallel in layouts(launch.shape, launch.world):
        launch.reference.change(version + 1)
        publisher = launch.connect(parallel)
        report = publisher.publish(version=version)
        assert (
            report.verified
            and report.version == version
            and report.num_tensors == len(launch.reference.shapes)
        )
        where = str(Layout.of(parallel, launch.world, 0))
        samples = launch.sample(version)
        seen["errors"][where] = launch.reference.error(samples, 0.7)
        seen["errors"][f"{where} greedy"] = launch.reference.error(launch.sample(version, 0.0), 1.0)
        seen["bytes"][where] = [report.bytes_kept, report.bytes_received]
        seen["tokens"][where] = [sample.tokens.tolist() for sample in samples]
        version += 1
    assert publisher is not None
    first = [sample.rollout_logprobs for sample in launch.sample(version - 1)]
    publisher.publish(version=version)
    again = [sample.rollout_logprobs for sample in launch.sample(version)]
    seen["unchanged"] = max(float((a - b).abs().max()) for a, b in zip(first, again, strict=True))
    seen["old version"] = refused(lambda: launch.sample(version - 1))
    launch.change(99)  # two in a row through one publisher, the second with other weights
    seen["stale"] = launch.reference.error(launch.sample(version), 0.7)
    publisher.publish(version=version + 1)
    seen["errors"]["again"] = launch.reference.error(launch.sample(version + 1), 0.7)
    return seen


def torn(launch: Launch, parallel: Parallel) -> dict:
    """Bytes that change on their way: the engine goes on with its old weights; without staging it has none left."""
    held, seen = launch.engine.receiver.version, {}
    assert held is not None
    before = launch.sample(held)
    launch.reference.change(97)
    link = Faulty()
    publisher = launch.connect(parallel, link)
    if not publisher.plan.bytes_received:
        return seen
    seen["flipped"] = refused(lambda: publisher.publish(version=49))
    seen["kept"] = [
        a.tokens.equal(b.tokens) and a.rollout_logprobs.equal(b.rollout_logprobs)
        for a, b in zip(before, launch.sample(held), strict=True)
    ]
    seen["new version"] = refused(lambda: launch.sample(49))
    link.flips = False
    publisher.publish(version=49)
    seen["healed"] = launch.reference.error(launch.sample(49), 0.7)
    launch.reference.change(96)
    streamed = launch.connect(parallel, link, is_atomic=False)
    streamed.publish(version=50)
    seen["streamed"] = launch.reference.error(launch.sample(50), 0.7)
    link.flips = True
    seen["flipped, streamed"] = refused(lambda: streamed.publish(version=51))
    seen["after flip, streamed"] = refused(lambda: launch.sample(50))
    return seen


def faults(launch: Launch) -> dict:
    """Changed bytes, a missing tensor, a missing parameter, a trainer that scores otherwise; then all is well."""
    seen: dict = {}
    if launch.world > 1:
        seen |= torn(launch, PP2 if launch.tensor < launch.world else Parallel())
    seen["missing tensor"] = refused(
        lambda: launch.connect(TP2 if launch.world > 1 else Parallel(), drop="model.norm.weight")
    )
    seen["table"] = refused(
        lambda: launch.connect(Parallel(), moved="model.layers.1.self_attn.v_proj.weight")
    )
    good = launch.connect(TP2 if launch.world > 1 else Parallel())
    if launch.rank == 0:
        del launch.held["decoder.layers.1.self_attention.linear_proj.weight"]
    seen["missing parameter"] = refused(lambda: good.publish(version=51))
    seen["after missing"] = refused(lambda: launch.sample(51))
    launch.held = holder(launch.slices, launch.reference.weights)
    launch.reference.change(98)  # the trainer now scores with weights it does not send
    seen["probe"] = refused(lambda: good.publish(version=52))
    seen["after probe"] = refused(lambda: launch.sample(52))
    launch.held = holder(launch.slices, launch.reference.weights)
    good.publish(version=53)
    seen["recovered"] = launch.reference.error(launch.sample(53), 0.7)
    return seen


def turns(launch: Launch) -> dict:
    """Two turns; requests that are aborted; what reaches one rank of the replica only."""
    engine, error = launch.engine, launch.reference.error
    requests = launch.requests()
    both = sample_all(Echo(engine), requests)
    seen = {"errors": [error(both, 0.7)], "echo": []}
    for request, sample in zip(requests, both, strict=True):
        first, second = sample.trainable.long().diff().eq(1).nonzero().flatten() + 1
        echo = sample.tokens[first:second]
        response = echo[: len(echo) // 2]
        seen["echo"].append(
            response.equal(echo.flip(0)[: len(echo) // 2])
            and sample.tokens[:first].tolist() == list(request.prompt.tokens)
        )
    engine.submit(requests)
    engine.poll(0.0)
    engine.poll(0.0)
    keys = [request.key for request in requests]
    aborted = engine.abort(keys[1:3])
    again = next(request for request in requests if request.key == keys[1])
    engine.submit([again])
    aborted += engine.abort(keys[1:2])  # before its first token
    seen["aborted"] = [(s.finish, int(s.trainable.sum()), engine.running()) for s in aborted]
    rest = sample_all(engine, [again])
    seen["rest"] = [sample.key for sample in rest]
    seen["errors"].append(error([*rest, *aborted[:2]], 0.7))
    try:
        engine.abort(keys[:1])
    except ValueError as refusal:
        seen["twice"] = str(refusal)
    if launch.rank == 0:
        engine.submit(requests)
    found = []
    while len(found) < 5:
        found += engine.poll()
    seen["first"] = sorted((sample.key, sample.tokens.tolist()) for sample in found)
    if launch.rank == 1:
        engine.submit(requests[1:2])
    seen["strange"] = refused(engine.poll)
    return seen


def dies(folder: Path, name: str) -> None:
    """The last rank dies in the middle of a sync; the other's engine is asked again."""
    launch = Launch(folder, name, 1)
    link = Faulty(timeout_s=20)
    link.flips = False
    publisher = launch.connect(PP2, link)
    publisher.publish(version=1)
    before = [sample.rollout_logprobs.tolist() for sample in launch.sample(1)]
    launch.change(5)
    link.dies_in = 3
    seen = {"said": refused(lambda: publisher.publish(version=2))}
    seen["same"] = before == [sample.rollout_logprobs.tolist() for sample in launch.sample(1)]
    (folder / f"rank_{launch.rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # the world is broken: nothing to close


def in_bf16(folder: Path, names: Sequence[str]) -> dict:
    """A sync of each family; another with other weights; the first weights again."""
    seen: dict = {}
    for name in names:
        launch = Launch(folder, name, 1, dtype=torch.bfloat16)
        publisher = launch.connect(Parallel())
        publisher.publish(version=0)
        first = launch.sample(0)
        error = float(launch.reference.errors(first, 0.7).mean())
        launch.change(5)
        stale = float(launch.reference.errors(first, 0.7).mean())
        publisher.publish(version=1)
        launch.change(0)
        publisher.publish(version=2)
        pairs = zip(first, launch.sample(2), strict=True)
        same = all(a.rollout_logprobs.equal(b.rollout_logprobs) for a, b in pairs)
        seen[name] = {"error": error, "stale": stale, "same": same}
        launch.engine.close()
    return seen


def main(folder: Path, cases: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    if cases[0] == "bf16":
        (folder / "rank_0.json").write_text(json.dumps(in_bf16(folder, cases[1:])))
        return
    if cases[0] == "dies":
        dies(folder, cases[1])
    seen: dict = {}
    for case in cases:
        name, tensor, *with_faults = case.split(":")
        launch = Launch(folder, name, int(tensor))
        seen[name] = syncs(launch)
        if "faults" in with_faults:
            seen["faults"] = faults(launch)
        if name == "qwen3" and launch.world == launch.tensor == 2:
            seen[name]["turns"] = turns(launch)
        launch.engine.close()
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
