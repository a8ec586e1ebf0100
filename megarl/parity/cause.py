"""Finds where an engine differs from the trainer, by recomputing one thing at a time.

    score the sampled tokens again    log-probs agree -> sampling temperature or decoding
    replay the engine's routes        log-probs agree -> routing
    replace sublayers' outputs        a replaced sublayer -> a cause
    compare log-probs again           they still differ -> softmax, logit scale or output head

Sublayers are replaced in order: the output of the first one that differs by more than rounding is
replaced by the engine's, until none differs. A sublayer that only passed a difference on then
agrees.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from megarl.models.shape import LayerKind
from megarl.parity.statistics import Excess, Quantiles, rounding_floor
from megarl.parity.sublayers import (
    fixed_projections,
    record_outputs,
    rounding_errors,
    trainer_sublayers,
)
from megarl.rollout.vllm.engine import Engine
from megarl.trainer.trainer import Trainer
from megarl.types import TokenBatch
from megarl.weights.sync.transports import Transport

MAX_REPLACED = 8
DRAWS = 2
TITLES = {
    "input_norm": "input norm",
    "attention": "attention",
    "mlp_norm": "norm before the MLP",
    "mlp": "MLP",
}
X = TypeVar("X")


@dataclass(frozen=True)
class CauseSearch:
    """Searches for the cause of a difference between trainer and engine.

    Methods are collectives of all ranks, and return the same result on each.
    """

    trainer: Trainer
    engine: Engine  # this rank's
    transport: Transport
    eps: float  # relative rounding error of a sublayer

    def find(
        self, batch: TokenBatch, floor: Quantiles, rollout_logprobs_T: Tensor | None = None
    ) -> str | None:
        """Returns the cause, as the end of a sentence; None if it is not found.

        `batch` should have few rows. `floor`: the differences that rounding explains on these rows;
        `rollout_logprobs_T`: the engine's log-probs at sampling, at the batch's temperature.
        """
        batch_1 = replace(batch, temperature=1.0)
        logprobs_T = self.trainer.logprobs(batch_1)
        # [T] of each rank's engine
        scores = self.transport.gather(_padded(self.engine.score(_rows(batch_1))))
        scored = [Excess(_diff(batch_1, logprobs_T - scores_T), floor) for scores_T in scores]
        rank = max(range(len(scored)), key=lambda rank: scored[rank].statistic)
        if not scored[rank].is_explained:
            return self._of_routing(batch_1, floor, rank, scored[rank].found) or self._of_model(
                batch_1, floor, rank
            )
        if rollout_logprobs_T is None:
            return None
        if temperature := self._fitted_temperature(batch, floor, rollout_logprobs_T):
            return (
                f"the sampling settings: the engine sampled at temperature {temperature:.2g}, "
                f"the trainer divides logits by {batch.temperature:g}"
            )
        return (
            "decoding: scored again from the start, these tokens agree; positions, KV cache or "
            "sampling settings"
        )

    def _fitted_temperature(
        self, batch: TokenBatch, floor: Quantiles, rollout_logprobs_T: Tensor
    ) -> float | None:
        """Returns the temperature that explains the difference, or None.

        It must remove 80% of the median difference, or half of it if rounding explains the rest.
        """

        def diff_at(log2: float) -> Quantiles:
            at = replace(batch, temperature=batch.temperature * 2**log2)
            return _diff(batch, self.trainer.logprobs(at) - rollout_logprobs_T)

        best = 0.0
        width = 1.0
        unfitted = diff_at(0.0).median
        for _ in range(4):
            tried = torch.linspace(best - width, best + width, 7).tolist()
            best = min(tried, key=lambda x: diff_at(x).median)
            width /= 3
        left = diff_at(best)
        is_fitted = left.median < 0.2 * unfitted or (
            left.median < 0.5 * unfitted and Excess(left, floor).is_explained
        )
        return batch.temperature * 2**best if is_fitted else None

    def _of_routing(
        self, batch: TokenBatch, floor: Quantiles, rank: int, before: Quantiles
    ) -> str | None:
        """Replays the routes of the engine on `rank`.

        Returns routing as the cause, or None if it does not explain the difference.
        """
        scores, choices = self._of_engine(
            rank, lambda engine: engine.score_with_choices(_rows(batch))
        )
        if not choices or batch.choices or not self.trainer.follows_choices:
            return None
        outputs = self.trainer.forward(replace(batch, choices=choices))
        assert outputs.logprobs_T is not None
        left = _diff(batch, outputs.logprobs_T - _padded(scores))
        share = outputs.metrics["routing/differs"]
        if not Excess(left, floor).is_explained:
            return None
        return (
            f"routing: the engine chose other experts for {share:.2%} of (token, layer) pairs; "
            f"with its routes replayed, {before} becomes {left}; "
            "rollout.router_replay=engine trains so"
        )

    def _of_model(self, batch: TokenBatch, floor: Quantiles, rank: int) -> str | None:
        """Names the sublayers that differ on their own in the engine on `rank`, and the head if it
        does; None if nothing differs.
        """
        rows = _rows(batch)
        seen = self._of_engine(
            rank, lambda engine: engine.states(rows, fixed_projections(self.trainer.shape.hidden))
        )
        has = set().union(*self.transport.gather(list(trainer_sublayers(self.trainer))))
        names = [name for name in seen if name in has]
        if not names:
            return None
        logprobs_T, outputs_NT8 = self._run(batch, names)
        noise = []
        for draw in range(DRAWS):
            with rounding_errors(self.trainer, self.eps, draw=draw):
                noise.append((self._run(batch, names)[1] - outputs_NT8).norm(dim=2))
        floors = [
            rounding_floor(exact_T8.norm(dim=1), noise_DT, eps=self.eps)
            for exact_T8, noise_DT in zip(outputs_NT8, torch.stack(noise, 1), strict=True)
        ]
        replaced = {}
        first = 0
        while len(replaced) < MAX_REPLACED:
            errors_NT = [x_T8 - seen[name] for name, x_T8 in zip(names, outputs_NT8, strict=True)]
            off = [
                n
                for n in range(first, len(names))
                if not Excess(Quantiles.of(errors_NT[n].norm(dim=1)), floors[n]).is_explained
            ]
            if not off:
                break
            name = names[off[0]]
            first = off[0] + 1
            replaced |= self._of_engine(
                rank, lambda engine, name=name: engine.states(rows, None, [name])
            )
            logprobs_T, outputs_NT8 = self._run(batch, names, replaced=replaced)
        parts = _titles(list(replaced), self.trainer.shape.layer_kinds)
        if len(replaced) == MAX_REPLACED:
            return f"{parts} and more: the engine's weights are not the trainer's"
        head = self._of_head(batch, floor, rank, replaced, logprobs_T)
        return ", ".join(filter(None, [parts, head])) or None

    def _of_head(
        self,
        batch: TokenBatch,
        floor: Quantiles,
        rank: int,
        replaced: Mapping[str, Tensor],
        logprobs_T: Tensor,
    ) -> str:
        """Returns the fault of softmax, logit scale or output head; "" if log-probs agree.

        It compares the log-probs of the label and of the likeliest token, whose difference does not
        depend on the sum of exponentials in the softmax, and may have twice the rounding error.

        replaced: the engine's hidden states, by the name of the trainer's sublayer that has them
        """
        rows = _rows(batch)
        scores_T = _padded(self._of_engine(rank, lambda engine: engine.score(rows)))
        if Excess(_diff(batch, logprobs_T - scores_T), floor).is_explained:
            return ""
        best = self._of_engine(rank, lambda engine: engine.best(rows))
        best_T = _padded([tokens for tokens, _ in best])
        best_logprobs_T, _ = self._run(replace(batch, labels=best_T), list(replaced), replaced)
        is_other_T = batch.mask & (batch.labels != best_T)
        trainer_K = (logprobs_T - best_logprobs_T)[is_other_T].double()
        engine_K = (scores_T - _padded([scores for _, scores in best]))[is_other_T].double()
        scale = float(trainer_K @ engine_K / (trainer_K @ trainer_K).clamp(min=1e-30))
        twice = replace(floor, median=2 * floor.median, p90=2 * floor.p90)
        if Excess(Quantiles.of(engine_K - trainer_K), twice).is_explained:
            return (
                "the softmax: logits agree, their sum does not; does one side include a padded "
                "vocabulary?"
            )
        if Excess(Quantiles.of(engine_K - scale * trainer_K), twice).is_explained:
            return f"the scale of the logits: the engine's are {scale:.3g} times the trainer's"
        return "the output head"

    def _run(
        self,
        batch: TokenBatch,
        names: Sequence[str],
        replaced: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probs [T] and outputs [names, T, 8] of one forward pass."""
        with record_outputs(
            self.trainer, batch, trainer_sublayers(self.trainer), names, replaced
        ) as outputs_NT8:
            logprobs_T = self.trainer.logprobs(batch)
        return logprobs_T, outputs_NT8

    def _of_engine(self, rank: int, compute: Callable[[Engine], X]) -> X:
        """Runs `compute` on all engines, and returns the result of the one on `rank`.

        All must run it, because the ranks of a replica compute together.
        """
        found = compute(self.engine)
        return self.transport.gather(found if self.transport.rank == rank else None)[rank]


def _rows(batch: TokenBatch) -> list[Tensor]:
    return list(batch.tokens.split(batch.lengths_N.tolist()))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Returns [T]: an engine's values from each row's second token on, with a 0 appended to each
    row.
    """
    return torch.cat([torch.cat([row, row.new_zeros(1)]) for row in rows])


def _diff(batch: TokenBatch, diff_T: Tensor) -> Quantiles:
    return Quantiles.of(diff_T[batch.mask])


def _titles(names: Sequence[str], kinds: Sequence[LayerKind]) -> str:
    """["embedding", "layers.3.attention", "layers.3.mlp"] -> "embedding, layer 3
    (attention, MLP)", or "(attention, experts)" if the layer has experts; `kinds`: of each layer.
    """
    found = {}
    for name in names:
        _, number, part = name.split(".") if "." in name else ("", "", name)
        if not number:
            found[part.replace("_", " ")] = []
            continue
        is_experts = part == "mlp" and kinds[int(number)].has_experts
        parts = found.setdefault(f"layer {number}", [])
        parts.append("experts" if is_experts else TITLES[part])
    return ", ".join(
        f"{title} ({', '.join(parts)})" if parts else title for title, parts in found.items()
    )
