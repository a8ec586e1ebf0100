"""The cause of a difference, between a trainer and an engine that is the same trainer with a fault; with a real engine
in tests/dist/test_parity_faults.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from tiny_trainer import build, make_batch
from torch import Tensor

from megarl.data.collate import token_batch
from megarl.parity.cause import CauseSearch
from megarl.parity.gate import measure_logprobs, sampled_rows
from megarl.parity.statistics import FORMAT_EPS, Quantiles
from megarl.parity.sublayers import rounding_errors, trainer_sublayers
from megarl.rollout.vllm.sublayers import record_states
from megarl.trainer.heads import VocabularyHead
from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch
from megarl.weights.sync.transports import Transport

pytestmark = pytest.mark.usefixtures("one_rank")
Plant = Callable[[Trainer], AbstractContextManager[None]]


@dataclass
class FaultyEngine:
    trainer: Trainer
    plant: Plant
    is_compiled: bool = False

    def score(self, rows: Sequence[Tensor]) -> list[Tensor]:
        batch = self._batch(rows)
        return [x[:-1] for x in self._logprobs(batch).split(batch.cu_seqlens.diff().tolist())]

    def score_with_choices(self, rows: Sequence[Tensor]) -> tuple[list[Tensor], tuple[()]]:
        return self.score(rows), ()

    def best(self, rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        batch = self._batch(rows)
        tokens = range(self.trainer.shape.vocab)
        of_each_VT = [
            self._logprobs(replace(batch, labels=torch.full_like(batch.labels, token)))
            for token in tokens
        ]
        scores_T, tokens_T = torch.stack(of_each_VT).max(0)
        lengths = batch.cu_seqlens.diff().tolist()
        pairs = zip(tokens_T.split(lengths), scores_T.split(lengths), strict=True)
        return [(tokens[:-1], scores[:-1]) for tokens, scores in pairs]

    def states(
        self,
        rows: Sequence[Tensor],
        projection_HP: Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        if self.is_compiled:
            return {}
        modules = {
            n: x for n, x in trainer_sublayers(self.trainer).items() if names is None or n in names
        }
        order = sorted(modules, key=lambda n: (n == "final_norm", n != "embedding", *position(n)))
        found: dict[str, list[Tensor]] = {name: [] for name in order}
        for row in rows:
            with self.plant(self.trainer), record_states(modules, projection_HP) as kept:
                self.trainer.forward(self._batch([row]))
            for name in order:
                found[name].append(torch.cat(kept[name])[: len(row)])
        return {name: torch.cat(outputs) for name, outputs in found.items()}

    def sampled(self, batch: TokenBatch) -> Tensor:
        return self._logprobs(batch)

    def _logprobs(self, batch: TokenBatch) -> Tensor:
        with self.plant(self.trainer):
            logprobs_T = self.trainer.forward(batch).logprobs_T
        assert logprobs_T is not None
        return logprobs_T

    def _batch(self, rows: Sequence[Tensor]) -> TokenBatch:
        return token_batch(
            [(row, torch.ones_like(row, dtype=torch.bool)) for row in rows], temperature=1.0
        )


def position(name: str) -> tuple[int, int]:
    _, number, part = name.split(".") if "." in name else ("", "0", "input_norm")
    return int(number), ("input_norm", "attention", "mlp_norm", "mlp").index(part)


def healthy(trainer: Trainer) -> AbstractContextManager[None]:
    return rounding_errors(trainer, FORMAT_EPS[trainer.train.dtype], draw=99)


def changed(*patterns: str, by: float = 0.1) -> Plant:
    """Weights whose name contains one of the patterns, each element off by `by` of their size."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        params = {
            n: x for n, x in trainer.parameters_by_name().items() if any(p in n for p in patterns)
        }
        assert params
        kept = {name: x.clone() for name, x in params.items()}
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad(), healthy(trainer):
            for x in params.values():
                x.add_(
                    x.norm() / x.numel() ** 0.5 * by * torch.randn(x.shape, generator=noise).to(x)
                )
            yield
            for name, x in params.items():
                x.copy_(kept[name])

    return plant


def headed(head: VocabularyHead | None = None, *, temperature: float = 1.0) -> Plant:
    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        kept, forward = trainer.head, trainer.forward
        trainer.head = head or kept
        trainer.forward = lambda batch: forward(
            replace(batch, temperature=batch.temperature * temperature)
        )  # type: ignore[method-assign]
        with healthy(trainer):
            yield
        trainer.head = kept
        del trainer.forward  # type: ignore[attr-defined]

    return plant


LAYER = "decoder.layers.1."
CAUSES: dict[str, tuple[Plant, str]] = {
    "norm": (changed(LAYER + "input_layernorm"), "layer 1 (input norm)"),
    "attention": (changed(LAYER + "self_attention.linear_qkv"), "layer 1 (attention)"),
    "a layer": (changed(LAYER), "layer 1 (input norm, attention, norm before the MLP, MLP)"),
    "two layers": (
        changed("layers.0.mlp.", "layers.1.self_attention.linear_proj"),
        "layer 0 (MLP), layer 1 (attention)",
    ),
    "embedding and norm": (changed("word_embeddings", "final_layernorm"), "embedding, final norm"),
    "head": (changed("output_layer"), "the output head"),
    "MLP and head": (changed("layers.0.mlp.", "output_layer"), "layer 0 (MLP), the output head"),
    "scale": (
        headed(temperature=0.8),
        "the scale of the logits: the engine's are 1.25 times the trainer's",
    ),
    "padding": (
        headed(VocabularyHead(128, 1024)),
        "the softmax: logits agree, their sum does not; does one side include a padded vocabulary?",
    ),
}


@pytest.fixture(scope="module")
def trainer(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = build(
        tmp_path_factory.mktemp("model"), {"family": "qwen3", "hidden": 64, "tied": False}
    )
    yield trainer
    trainer.close()


def search(
    trainer: Trainer, plant: Plant, *, is_compiled: bool = False
) -> tuple[CauseSearch, FaultyEngine]:
    engine = FaultyEngine(trainer, plant, is_compiled)
    return CauseSearch(trainer, engine, Transport(), FORMAT_EPS["fp32"]), engine


@pytest.mark.parametrize("case", CAUSES)
def test_what_differs_by_itself_is_named_and_what_follows_is_not(
    trainer: Trainer, case: str
) -> None:
    plant, cause = CAUSES[case]
    batch = sampled_rows(make_batch(num_rows=8), 8)
    found, _ = search(trainer, plant)
    assert found.find(batch, measure_logprobs(trainer, batch).floor) == cause


def test_an_engine_that_agrees_has_no_cause(trainer: Trainer) -> None:
    batch = sampled_rows(make_batch(num_rows=8), 8)
    found, _ = search(trainer, healthy)
    assert found.find(batch, measure_logprobs(trainer, batch).floor) is None


def test_a_compiled_engine_cannot_be_seen(trainer: Trainer) -> None:
    batch = sampled_rows(make_batch(num_rows=8), 8)
    found, _ = search(trainer, changed("output_layer"), is_compiled=True)
    assert found.find(batch, measure_logprobs(trainer, batch).floor) is None


@pytest.mark.parametrize(("temperature", "sampled"), [(0.7, 0.63), (1.0, 1.3)])
def test_another_temperature_is_named(trainer: Trainer, temperature: float, sampled: float) -> None:
    batch = sampled_rows(make_batch(num_rows=8, temperature=temperature), 8)
    found, engine = search(trainer, healthy)
    rollout_T = engine.sampled(replace(batch, temperature=sampled))
    cause = found.find(batch, measure_logprobs(trainer, batch).floor, rollout_T)
    assert (
        cause is not None
        and f"sampled at temperature {sampled:.2g}, the trainer divides logits by {temperature:g}"
        in cause
    )


def test_a_temperature_may_leave_what_rounding_explains(trainer: Trainer) -> None:
    batch = sampled_rows(make_batch(num_rows=8), 8)
    found, engine = search(trainer, healthy)
    rollout_T = engine.sampled(replace(batch, temperature=0.9))
    off_K = (rollout_T - engine.sampled(batch))[batch.mask].double()
    noise_T = (
        torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
        * 0.5
        * off_K.abs().median()
    )
    floor = Quantiles.of(noise_T[batch.mask])
    cause = found.find(batch, floor, rollout_T + noise_T)
    assert cause is not None and re.search(r"sampled at temperature 0\.(8[5-9]|9)", cause), cause
    less = replace(floor, median=floor.median / 4, p90=floor.p90 / 4)
    cause = found.find(batch, less, rollout_T + noise_T)
    assert cause is not None and cause.startswith("decoding"), cause


def test_tokens_that_agree_when_scored_again_point_to_decoding(trainer: Trainer) -> None:
    batch = sampled_rows(make_batch(num_rows=8), 8)
    found, engine = search(trainer, healthy)
    wrong_T = engine.sampled(batch) + torch.randn(
        batch.num_tokens, generator=torch.Generator().manual_seed(0)
    )
    cause = found.find(batch, measure_logprobs(trainer, batch).floor, wrong_T)
    assert cause is not None and cause.startswith("decoding")
