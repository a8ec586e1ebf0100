"""Where parity draws the line: healthy starts and runs stay below its bound, planted faults lie above and are named.

    python -m benchmarks.parity [--only TEXT] [--real models/SmolLM2-135M-Instruct]      about 80 minutes on two cores
    python -m benchmarks.parity --faults CONFIG KEY=VALUE ...                           the faults of one model, as JSON

healthy   `megarl check CONFIG --sync` of tiny and real models, dense and experts, fp32 and bf16, in several layouts and
          seeds: the probe's statistic over its bound, at most 0.5. Training: the largest of all steps.
faults    the engine has the published weights; the trainer is then changed in one way, which is undone afterwards.
          Statistic over bound, at least 2 (1, refused, for the norm of one layer), and the cause that is named. Older
          weights are those of before 20 updates.

A full run writes benchmarks/results/parity.txt; one that was interrupted continues (parity.part).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.exhaustive import versions
from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.commands.random_model import materialize_model
from megarl.commands.rank_checks import parity_batch
from megarl.config.load import load_config
from megarl.data.packing import plan_microbatches
from megarl.parity.gate import ParityChecks, measure_logprobs, sampled_rows
from megarl.parity.layouts import prompt_rows
from megarl.parity.statistics import Excess, Quantiles
from megarl.platform.env import Env, child_env
from megarl.processes.exit_codes import CurrentPhase
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext, open_rank
from megarl.run.data import make_prompts
from megarl.run.engine import make_engine
from megarl.run.models import make_trainer
from megarl.run.sync import parity_checks, rank_publisher
from megarl.telemetry.metrics import read_metrics
from megarl.trainer.heads import HeadOptions, VocabularyHead
from megarl.trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "parity.txt"
PART = RESULTS.with_suffix(".part")
UPDATES = 20  # between older weights and the trainer's
LAYOUTS = {
    "one process": "",
    "dp2": "launch.processes=2",
    "tp2": "launch.processes=2 parallel.tensor=2",
    "pp2": "launch.processes=2 parallel.pipeline=2",
    "engine tp2": "launch.processes=2 rollout.tensor=2",
}
EXPERT_LAYOUTS = {
    "ep2": "launch.processes=2 parallel.expert=2",
    "tp2 ep2": "launch.processes=2 parallel.tensor=2 parallel.expert=2",
}
REAL_LAYOUTS = {
    "one process": "",
    "dp2": "launch.processes=2",
    "pp2": "launch.processes=2 parallel.pipeline=2",
    "tp3": "launch.processes=3 parallel.tensor=3",
}
TRAININGS = {
    "tiny_dense bf16, 200 steps": "configs/tiny_dense.yaml train.dtype=bf16 train.steps=200",
    "tiny_moe bf16, 200 steps": "configs/tiny_moe.yaml train.dtype=bf16 train.steps=200",
}
FEW_SAMPLES = (
    "train.prompts_per_step=2 rollout.samples_per_prompt=4 algorithm.filter_zero_std=false"
)
REAL_TRAININGS = {
    f"SmolLM2 {dtype}, 20 steps": "examples/addition/addition.yaml train.steps=20 eval.every=0 checkpoint.export_hf=never "
    f"train.dtype={dtype} {FEW_SAMPLES}"
    for dtype in ("fp32", "bf16")
}
FAULTS = {
    f"{model} {dtype}": f"configs/{model}.yaml train.dtype={dtype}"
    for model in ("tiny_dense", "tiny_moe")
    for dtype in ("fp32", "bf16")
}
REAL_FAULTS = {
    f"SmolLM2 {dtype}": f"examples/addition/addition.yaml train.dtype={dtype} train.lr=1e-4"
    for dtype in ("fp32", "bf16")
}


@dataclass(frozen=True)
class Found:
    fault: str
    size: str
    ratio: float  # statistic over bound
    at_least: float
    cause: str
    is_named: bool


@dataclass(frozen=True)
class OlderHead(VocabularyHead):
    """Reads with other weights than the embedding's, also where both are tied."""

    weight_VH: Tensor = field(default_factory=lambda: torch.empty(0))

    @torch.no_grad()
    def read(self, model: Any, hidden_SH: Tensor, labels_S: Tensor, options: HeadOptions) -> Any:
        weight = head_weight(model)
        kept = weight.clone()
        weight.copy_(self.weight_VH)
        try:
            return super().read(model, hidden_SH, labels_S, options)
        finally:
            weight.copy_(kept)


def head_weight(model: Any) -> Tensor:
    is_tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight


@dataclass
class Faults:
    """Plants one fault after another in a trainer whose weights the engine has."""

    rank: RankContext
    trainer: Trainer
    engine: Engine
    checks: ParityChecks
    updated: Mapping[str, Tensor]  # the trainer's parameters after UPDATES steps

    def all(self) -> Iterator[Found]:
        shape, params = self.rank.shape, self.trainer.parameters_by_name()
        layer = shape.layers // 2
        head = head_weight(unwrapped(self.trainer))
        name = next(name for name, each in params.items() if each.data_ptr() == head.data_ptr())
        older = OlderHead(
            shape.vocab, self.trainer.train.logprob_chunk, weight_VH=self.updated[name]
        )
        yield self.probed(
            "stale head", distance([name], params, self.updated), r"^the output head$", head=older
        )
        if shape.is_moe:
            first = [name for name in params if f"layers.{layer}." in name and "experts.0." in name]
            pairs = [(name, name.replace("experts.0.", "experts.1.")) for name in first]
            swapped = {a: params[b].clone() for a, b in [*pairs, *((b, a) for a, b in pairs)]}
            yield self.probed(
                "swapped experts",
                f"2 of {shape.experts} in one layer",
                rf"^layer {layer} \(experts\)$",
                weights=swapped,
            )
        final = next(name for name in params if name.endswith("final_layernorm.weight"))
        yield self.probed(
            "one norm, the last",
            "1.05 times",
            "^final norm$",
            weights={final: params[final] * 1.05},
        )
        norm = next(name for name in params if f"layers.{layer}.input_layernorm" in name)
        weights, cause = {norm: params[norm] * 1.05}, rf"^layer {layer} \(input norm\)$"
        yield self.probed(
            "one norm, of a layer", "1.05 times", cause, weights=weights, at_least=1.0
        )
        names = [name for name in params if f"layers.{layer}." in name]
        mlp = "experts" if shape.layer_kinds[layer].has_experts else "MLP"
        yield self.probed(
            "one layer of older weights",
            distance(names, params, self.updated),
            rf"^layer {layer} \(.*attention.*{mlp}\)$",
            weights={name: self.updated[name] for name in names},
        )
        if padding := head.shape[0] - shape.vocab:
            padded = VocabularyHead(head.shape[0], self.trainer.train.logprob_chunk)
            yield self.probed(
                "padded vocabulary in the softmax",
                f"{padding} rows beyond {shape.vocab}",
                "^the softmax",
                head=padded,
            )
        yield self.sampled_at(0.9)

    def probed(
        self,
        fault: str,
        size: str,
        cause: str,
        *,
        weights: Mapping[str, Tensor] | None = None,
        head: Any = None,
        at_least: float = 2.0,
    ) -> Found:
        params, kept_head = self.trainer.parameters_by_name(), self.trainer.head
        kept = {name: params[name].clone() for name in weights or {}}
        copy(weights or {}, params)
        self.trainer.head = head or kept_head
        try:
            batch, (excess, *_) = self.checks.probe()
            assert self.checks.find
            return judged(
                fault, size, excess, self.checks.find(batch, excess.floor), cause, at_least
            )
        finally:
            copy(kept, params)
            self.trainer.head = kept_head

    def sampled_at(self, temperature: float) -> Found:
        config = self.rank.config
        rollout = config.rollout.model_copy(update={"temperature": temperature})
        rank = replace(self.rank, config=config.model_copy(update={"rollout": rollout}))
        batch = replace(parity_batch(rank, self.engine), temperature=1.0)
        measured = measure_logprobs(self.trainer, batch)
        found = Quantiles.of(measured.logprobs_K - batch.rollout_logprobs[batch.mask])
        excess = self.checks.excess(found, measured.floor, prompts=batch.prompt_id.unique().numel())
        few = sampled_rows(batch, 8)
        assert self.checks.find
        cause = self.checks.find(
            few, measure_logprobs(self.trainer, few).floor, few.rollout_logprobs
        )
        pattern = r"sampled at temperature 0\.(89|9|91),"
        return judged(f"temperature {temperature} for 1.0", "at sampling", excess, cause, pattern)


def judged(
    fault: str, size: str, excess: Excess, cause: str | None, pattern: str, at_least: float = 2.0
) -> Found:
    is_named = bool(cause and re.search(pattern, cause))
    return Found(fault, size, excess.statistic / excess.limit, at_least, cause or "", is_named)


@torch.no_grad()
def distance(names: Sequence[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    off = sum(float((a[name].double() - b[name].double()).square().sum()) for name in names) ** 0.5
    size = sum(float(a[name].double().square().sum()) for name in names) ** 0.5
    return f"{UPDATES} updates, {off / size:.2%} of the weights' norm"


@torch.no_grad()
def copy(source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, value in source.items():
        into[name].copy_(value)


def unwrapped(trainer: Trainer) -> Any:
    model: Any = trainer.model[0]
    while not hasattr(model, "share_embeddings_and_output_weights"):
        model = model.module
    return model


def updated_weights(rank: RankContext, trainer: Trainer) -> dict[str, Tensor]:
    """The parameters after UPDATES steps; the trainer keeps those of before."""
    params = trainer.parameters_by_name()
    before = {name: each.clone() for name, each in params.items()}
    batch = prompt_rows(make_prompts(rank).take(8), num_tokens=24, vocab=rank.shape.vocab)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    for _ in range(UPDATES):
        trainer.step(batch, plan, supervised_loss, loss_weights(batch, plan))
    after = {name: each.clone() for name, each in params.items()}
    copy(before, params)
    return after


def plant_faults(config_file: str, overrides: list[str]) -> list[Found]:
    with tempfile.TemporaryDirectory() as folder:
        config = materialize_model(load_config(config_file, [f"run.dir={folder}", *overrides]))
        with open_rank(config, Env.read(), CurrentPhase()) as rank:
            engine, trainer = make_engine(rank), make_trainer(rank)
            checks = parity_checks(rank, trainer, engine)
            rank_publisher(rank, trainer, engine, checks).publish(version=0)
            return list(Faults(rank, trainer, engine, checks, updated_weights(rank, trainer)).all())


def megarl(*arguments: str) -> str:
    command = [sys.executable, "-m", "megarl.cli", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=child_env(OMP_NUM_THREADS=1)
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:])} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def healthy_starts(real: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yields a name and the arguments of `megarl check --sync`: 32 tiny starts and 8 real ones."""
    for dtype in ("fp32", "bf16"):
        for model, layouts in (("tiny_dense", LAYOUTS), ("tiny_moe", LAYOUTS | EXPERT_LAYOUTS)):
            for layout, keys in layouts.items():
                for seed in (1, 2, 3) if not keys else (1,):
                    arguments = [
                        f"configs/{model}.yaml",
                        f"train.dtype={dtype}",
                        f"run.seed={seed}",
                        *keys.split(),
                    ]
                    yield f"{model} {dtype} {layout}, seed {seed}", arguments
        for layout, keys in REAL_LAYOUTS.items() if real else ():
            arguments = [
                "examples/addition/addition.yaml",
                f"model.path={real}",
                f"train.dtype={dtype}",
                *keys.split(),
            ]
            yield f"SmolLM2 {dtype} {layout}", arguments


def run_start(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = megarl("check", *arguments, "--sync", f"run.dir={folder}")
    statistic, bound = map(float, re.findall(r"statistic (\S+), at most (\S+)", out)[0])
    return statistic / bound


def run_training(arguments: list[str]) -> float:
    """Returns the largest statistic / bound of all steps."""
    with tempfile.TemporaryDirectory() as folder:
        megarl("train", *arguments, f"run.dir={folder}", "run.name=parity")
        steps = read_metrics(Path(folder) / "parity" / "metrics.jsonl")
    return max(step["logprob_diff/statistic"] / step["logprob_diff/limit"] for step in steps)


def run_faults(arguments: list[str]) -> Iterator[tuple[float, str]]:
    """Yields statistic over bound, and what was planted and named."""
    command = [sys.executable, "-m", "benchmarks.parity", "--faults", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=child_env(OMP_NUM_THREADS=1),
    )
    for found in json.loads(done.stdout.splitlines()[-1]):
        right = "" if found["is_named"] else "  WRONG NAME"
        yield found["ratio"], f"{found['fault']} ({found['size']}): {found['cause']}{right}"


def cases(real: str | None) -> Iterator[tuple[str, str, Callable[[], list[str]]]]:
    """Yields section, name, and what runs it and returns its lines."""
    path = [f"model.path={real}"] if real else []
    healthy, faulty = (
        "healthy: statistic / bound, at most 0.5",
        "faults: statistic / bound, at least 2, and the cause that is named",
    )
    for name, arguments in healthy_starts(real):
        yield healthy, name, lambda name=name, keys=arguments: [f"  {run_start(keys):8.3f}  {name}"]
    for name, text in (TRAININGS | (REAL_TRAININGS if real else {})).items():
        keys = [*text.split(), *(path if name in REAL_TRAININGS else [])]
        yield healthy, name, lambda name=name, keys=keys: [f"  {run_training(keys):8.3f}  {name}"]
    for name, text in (FAULTS | (REAL_FAULTS if real else {})).items():
        keys = [*text.split(), *(path if name in REAL_FAULTS else [])]
        yield (
            faulty,
            name,
            lambda name=name, keys=keys: [
                f"  {ratio:8.3g}  {name}: {text}" for ratio, text in run_faults(keys)
            ],
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run only the cases whose name contains TEXT"
    )
    parser.add_argument(
        "--real", metavar="FOLDER", help="SmolLM2-135M-Instruct; without it, only tiny models"
    )
    parser.add_argument(
        "--faults", nargs="+", metavar=("CONFIG", "KEY=VALUE"), help="plant them in one model"
    )
    args = parser.parse_args()
    if args.faults:
        print(
            json.dumps([asdict(found) for found in plant_faults(args.faults[0], args.faults[1:])])
        )
        return 0
    is_full = args.real and not args.only
    done: dict[str, list[str]] = json.loads(PART.read_text()) if is_full and PART.exists() else {}
    lines = [f"date      {time.strftime('%Y-%m-%d', time.gmtime())}", f"versions  {versions()}"]
    previous = ""
    for section, name, run in cases(args.real):
        if args.only in name:
            found = done[f"{section}: {name}"] = done.get(f"{section}: {name}") or run()
            heading = ["", section] if section != previous else []
            print(*heading, *found, sep="\n", flush=True)
            lines += [*heading, *found]
            previous = section
            if is_full:
                PART.write_text(json.dumps(done, indent=1))
    if is_full:
        RESULTS.write_text("\n".join(["$ python -m benchmarks.parity --real FOLDER", *lines, ""]))
        PART.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
