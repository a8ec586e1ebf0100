"""Whole GRPO steps at a fixed response length against TRL's GRPOTrainer; before that, one update on recorded samples.

The same model, prompts (token ids), samples a prompt, response length, reward, loss and fp32 Adam on both sides; megarl
samples with vLLM, TRL with transformers. The reward is the share of even token ids. "one update" compares grad_norm.
A contender's processes x threads use two cores; its seconds are the fastest step of a job, `load` the machine's.

    pip install --no-deps trl==1.16.0 accelerate datasets pandas
    python -m benchmarks end_to_end        the quickstart's architecture; MEGARL_BENCH_MODEL=FOLDER: that model
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

from benchmarks.frame import Case, Contender, Outcome
from benchmarks.peers import trl_module
from megarl.algorithms.objective import Objective
from megarl.commands.random_model import create_model
from megarl.config.load import load_config
from megarl.config.schema import Algorithm, Config, Create, Train
from megarl.data.collate import collate
from megarl.data.conversations import example_encoder
from megarl.data.prompts import PromptStream
from megarl.data.tasks import load_sources
from megarl.data.tokenizer import load_tokenizer
from megarl.layout import Layout, Parallel
from megarl.models.registry import read_model
from megarl.platform.env import child_env, get_env
from megarl.types import Group, Prompt, Sample, TrainBatch

__all__ = ["CASES", "even_share", "megarl_steps", "megarl_update", "trl_steps", "trl_update"]

HERE = "benchmarks.end_to_end"
ROOT = Path(__file__).parents[1]
GRPO: dict[str, Any] = {
    "advantage": "grpo",
    "advantage_options": {"std": "unbiased", "eps": 1e-4},
    "loss": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "seq-mean-token-mean",
    "filter_zero_std": False,
}
MODEL = get_env("MEGARL_BENCH_MODEL") or ""
SIZES: dict[str, int] = (  # of the shipped configs
    {"prompts": 8, "samples": 8, "response": 16}
    if MODEL
    else {"prompts": 64, "samples": 8, "response": 8}
)
# processes on two cores, the fastest of 1 and 2 first
BEST = {"megarl": (2,), "TRL": (2, 1)}
TITLE = Path(MODEL).name or "quickstart"


def _cases() -> tuple[Case, ...]:
    arguments: dict[str, Any] = {"model": MODEL, **SIZES}
    first = Case(
        f"one update {TITLE}",
        (Contender("megarl", f"{HERE}:megarl_update"), Contender("TRL", f"{HERE}:trl_update")),
        arguments,
        threads=(2,),
        rtol=1e-4,
        atol=0.0,
    )
    steps = []
    for dtype in ("fp32", "bf16"):
        contenders = [
            Contender(f"{name} {n} x {2 // n}", f"{HERE}:{name.lower()}_steps", {"processes": n})
            for name, processes in BEST.items()
            for n in processes
        ]
        steps.append(
            Case(
                f"steps {TITLE} {dtype}",
                tuple(contenders),
                {**arguments, "dtype": dtype, "steps": 3 if MODEL else 8},
                threads=(2,),
                at_least=1.5 if MODEL else 1.0,
            )
        )
    return (first, *steps)


CASES = _cases()


def even_share(*, tokens: Sequence[int], **_unused: Any) -> float:
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def _config(model: str, /, **values: Any) -> Config:
    base = load_config(
        ROOT / ("examples/addition/addition.yaml" if model else "configs/quickstart.yaml")
    )
    fields = base.model_dump(mode="json")
    fields["algorithm"] = fields["algorithm"] | GRPO
    fields["rewards"] = [{"name": f"{HERE}:even_share"}]
    for section, changes in values.items():
        fields[section] |= changes
    return Config.model_validate(fields)


def _folder(model: str, parent: Path) -> Path:
    if model:
        return Path(model).resolve()
    create = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())["model"]["create"]
    return create_model(Create(**create), parent / "model")


def _prompts(config: Config, folder: Path, count: int) -> list[list[int]]:
    """Prompts as token ids, the same on both sides."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    encode = example_encoder(tokenizer, config.task)
    stream = PromptStream(
        load_sources(config.task, "train", ()), encode, max_tokens=1024, seed=config.run.seed
    )
    return [list(prompt.tokens) for prompt in stream.take(count)]


def _recorded(
    folder: Path, config: Config, prompts: int, samples: int, response: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) of each sample, uniform random tokens, none of which ends a response."""
    random = np.random.default_rng(0)
    vocab = read_model(folder).vocab
    return [
        (prompt, random.integers(vocab // 4, vocab, response).tolist())
        for prompt in _prompts(config, folder, prompts)
        for _ in range(samples)
    ]


def megarl_update(model: str, prompts: int, samples: int, response: int) -> Callable[[], Outcome]:
    from megarl.trainer.learner import PolicyLearner
    from megarl.trainer.trainer import Trainer

    def call() -> Outcome:
        with tempfile.TemporaryDirectory() as parent:
            folder, config = _folder(model, Path(parent)), _config(model)
            recorded = _recorded(folder, config, prompts, samples, response)
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            train = Train(
                dtype="fp32",
                lr=1e-5,
                max_tokens_per_microbatch=config.train.max_tokens_per_microbatch,
            )
            layout, device = Layout.of(Parallel(), 1, 0), torch.device("cpu")
            trainer = Trainer.build(
                read_model(folder), layout, train=train, folder=folder, device=device
            )
            objective = Objective(Algorithm(**GRPO), response)
            learner = PolicyLearner(trainer, objective)
            batch = _batch(recorded, samples)
            scored, _ = objective.advantages(batch, learner.score(batch), objective.initial_state())
            start = time.perf_counter()
            update = learner.update(scored).updates[0]
            seconds = time.perf_counter() - start
            trainer.close()
            dist.destroy_process_group()
        return Outcome(np.array([update.grad_norm]), seconds, {"grad_norm": update.grad_norm})

    return cache(call)


def _batch(recorded: list[tuple[list[int], list[int]]], samples: int) -> TrainBatch:
    groups = []
    for first in range(0, len(recorded), samples):
        rows = []
        for index, (prompt, answer) in enumerate(recorded[first : first + samples]):
            tokens = torch.tensor(prompt + answer)
            rows.append(
                Sample(
                    prompt_id=first,
                    index=index,
                    tokens=tokens,
                    trainable=torch.arange(len(tokens)) >= len(prompt),
                    rollout_logprobs=torch.zeros(len(tokens)),
                    versions=torch.zeros(len(tokens), dtype=torch.int32),
                    finish="length",
                    reward=even_share(tokens=answer),
                )
            )
        groups.append(Group(Prompt(first, tuple(recorded[first][0]), ""), tuple(rows)))
    return collate(groups, temperature=1.0)


def trl_update(model: str, prompts: int, samples: int, response: int) -> Callable[[], Outcome]:
    trl_module("trl")

    def call() -> Outcome:
        with tempfile.TemporaryDirectory() as parent:
            folder, config = _folder(model, Path(parent)), _config(model)
            recorded = _recorded(folder, config, prompts, samples, response)
            result = _train_trl(
                folder, parent, recorded, samples=samples, response=response, dtype="fp32", steps=1
            )
        return Outcome(
            np.array([result["grad_norm"]]),
            result["seconds"][0],
            {"grad_norm": result["grad_norm"]},
        )

    return cache(call)


def _train_trl(
    folder: Path,
    parent: str,
    samples_or_prompts: list[Any],
    *,
    samples: int,
    response: int,
    dtype: str,
    steps: int,
    processes: int = 1,
    recorded: bool = True,
) -> dict[str, Any]:
    """Trains on prompts given by number; `recorded`: on recorded samples. The update's inputs are TRL's own."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    trl = trl_module("trl")
    rows = samples_or_prompts
    num_prompts = len(rows) // samples if recorded else len(rows) // steps
    prompt_of = [rows[i * samples][0] for i in range(num_prompts)] if recorded else rows
    times = [time.perf_counter()]

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            times.append(time.perf_counter())

    def reward(completion_ids: list[list[int]], **_unused: Any) -> list[float]:
        return [even_share(tokens=tokens) for tokens in completion_ids]

    class Trainer(trl.GRPOTrainer):
        def _tokenize_prompts(
            self, prompts: list[str]
        ) -> tuple[list[list[int]], None, dict[str, Any]]:
            return [prompt_of[int(prompt)] for prompt in prompts], None, {}

        def _generate_single_turn(
            self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
        ) -> Any:
            times[0] = times[0] if len(times) > 1 else time.perf_counter()
            return (
                ([answer for _, answer in rows], None)
                if recorded
                else super()._generate_single_turn(prompt_ids, *args, **kwargs)
            )

    options = trl.GRPOConfig(
        output_dir=parent,
        use_cpu=True,
        bf16=dtype == "bf16",
        model_init_kwargs={"dtype": "float32"},  # autocast: the optimizer stays fp32
        gradient_checkpointing=False,
        per_device_train_batch_size=num_prompts * samples // processes,
        num_generations=samples,
        max_completion_length=response,
        generation_kwargs={"min_new_tokens": response},
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        learning_rate=1e-5,
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=steps,
        shuffle_dataset=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=str(folder),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list(
            [{"prompt": str(number)} for number in range(len(prompt_of))]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Clock()],
    )
    # transformers gives the padding token's row no gradient from the input; SmolLM2's is <|im_end|>, which is
    # in every prompt
    trainer.model.get_input_embeddings().padding_idx = None
    trainer.train()
    seconds = [after - before for before, after in pairwise(times)]
    lengths = {
        log["completions/mean_length"]
        for log in trainer.state.log_history
        if "completions/mean_length" in log
    }
    assert lengths == {float(response)}, lengths
    return {"seconds": seconds, "grad_norm": trainer.state.log_history[0]["grad_norm"]}


def megarl_steps(
    model: str, prompts: int, samples: int, response: int, dtype: str, steps: int, processes: int
) -> Callable[[], Outcome]:
    return _job("megarl", locals())


def trl_steps(
    model: str, prompts: int, samples: int, response: int, dtype: str, steps: int, processes: int
) -> Callable[[], Outcome]:
    trl_module("trl")
    return _job("trl", locals())


def _job(side: str, options: dict[str, Any]) -> Callable[[], Outcome]:
    """Runs a job of `processes` ranks on two cores once; its first step is a warm-up."""

    def call() -> Outcome:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as parent:
            file, world = Path(parent) / "seconds.json", options["processes"]
            request = json.dumps({"side": side, "parent": parent, **options})
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            _folder(options["model"], Path(parent))
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", HERE, request],
                    env=child_env(
                        RANK=rank,
                        LOCAL_RANK=rank,
                        WORLD_SIZE=world,
                        LOCAL_WORLD_SIZE=world,
                        MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=port,
                        OMP_NUM_THREADS=2 // world,
                        MKL_NUM_THREADS=2 // world,
                    ),
                    stdout=sys.stderr,
                )
                for rank in range(world)
            ]
            for rank in ranks:
                if rank.wait():
                    logs = [
                        log.read_text()[-1500:] for log in sorted(Path(parent).rglob("rank_*.log"))
                    ]
                    raise RuntimeError(
                        "\n".join([f"a rank of {side} failed with status {rank.returncode}", *logs])
                    )
            seconds = json.loads(file.read_text())[1:]
        return Outcome(seconds=min(seconds), figures={"median_s": median(seconds), "load": load})

    return cache(call)


def _rank(
    side: str,
    parent: str,
    model: str,
    prompts: int,
    samples: int,
    response: int,
    dtype: str,
    steps: int,
    processes: int,
) -> None:
    folder = (
        Path(model).resolve()
        if model
        else next((Path(parent) / "model").rglob("config.json")).parent
    )
    config = _config(
        model,
        run={"name": "bench", "dir": parent},
        model={"path": str(folder), "create": None},
        parallel={"tensor": 1},
        launch={"processes": processes},
        rollout={"samples_per_prompt": samples, "max_tokens": response, "stop": []},
        train={
            "steps": steps,
            "prompts_per_step": prompts,
            "lr": 1e-5,
            "dtype": dtype,
            "warmup_steps": 0,
        },
        checkpoint={"every": 0, "export_hf": "never", "resume": "never"},
        eval={"every": 0, "size": 1},
    )
    if side == "megarl":
        _run_megarl(config)
        rows = (Path(parent) / "bench" / "metrics.jsonl").read_text().splitlines()
        seconds = [json.loads(row)["time/step"] for row in rows]
        lengths = {json.loads(row)["length/mean"] for row in rows}
        assert lengths == {float(response)}, lengths
    else:
        ids = _prompts(config, folder, prompts * steps)
        options = {
            "samples": samples,
            "response": response,
            "dtype": dtype,
            "steps": steps,
            "processes": processes,
        }
        seconds = _train_trl(folder, parent, ids, recorded=False, **options)["seconds"]
    if get_env("RANK") == "0":
        (Path(parent) / "seconds.json").write_text(json.dumps(seconds))


def _run_megarl(config: Config) -> None:
    from megarl.platform.env import Env
    from megarl.run.engine import make_engine
    from megarl.run.rank_process import run_external
    from megarl.stages import rl

    def without_stops(rank: Any) -> Any:
        engine = make_engine(rank)
        engine._stop_token_ids, steps = [], engine._steps

        def fixed_length(prompts: Any, params: Any) -> Any:
            for request in params:
                request.ignore_eos = True
            return steps(prompts, params)

        engine._steps = fixed_length
        return engine

    rl.make_engine = without_stops
    if code := run_external(config, Env.read(), "train"):
        sys.exit(code)


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[1]))
    os._exit(0)
