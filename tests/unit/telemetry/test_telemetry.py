"""What a step leaves behind: metrics with the documented keys, rollouts, a timeline that is always whole, a report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.load import parse_config
from megarl.data.collate import collate
from megarl.telemetry import log
from megarl.telemetry.log import NodeTelemetry, Telemetry, Timeline, brief
from megarl.telemetry.metrics import (
    read_metrics,
    rollout_metrics,
    staleness_metrics,
    update_metrics,
)
from megarl.telemetry.profile import open_profiler
from megarl.telemetry.report import write_report
from megarl.types import (
    Finish,
    Group,
    Prompt,
    PublishReport,
    Rollout,
    Sample,
    ScoredBatch,
    StepReport,
    UpdateReport,
)

# ARCHITECTURE section 7
DOCUMENTED = """
step reward/mean reward/std reward/frac_zero_std loss grad_norm kl/ref kl/rollout logprob_diff/mean
logprob_diff/max clip_frac entropy length/mean length/truncated_frac weights/version weights/bytes weights/verified
time/step time/generate time/reward time/logprobs time/update time/publish tokens_per_second packing/efficiency
reward/accuracy/mean samples/dropped update/skipped updates world_size layout rollout/digest""".split()  # noqa: SIM905


def sample(
    prompt_id: int, index: int, reward: float, length: int = 3, finish: Finish = "stop"
) -> Sample:
    tokens = torch.arange(2 + length)
    trainable = tokens >= 2
    zeros = torch.zeros(2 + length)
    return Sample(
        prompt_id,
        index,
        tokens,
        trainable,
        zeros,
        zeros.int(),
        finish,
        f"said {index}",
        reward,
        {"accuracy": reward},
    )


def groups() -> list[Group]:
    prompts = [Prompt(i, (0, 1), f"ask <{i}>", "4") for i in range(2)]
    mixed = Group(
        prompts[0],
        (sample(0, 0, 1.0), sample(0, 1, 0.0, 5, "length")),
    )
    return [mixed, Group(prompts[1], (sample(1, 0, 1.0), sample(1, 1, 1.0)))]


def rolled(kept: list[Group], **counts: int) -> Rollout:
    counts = {"samples/dropped": 1, "groups/flat": 1} | counts
    return Rollout(tuple(kept), tuple(kept), counts, "ab")


def update(loss: float, *, skipped: bool = False) -> UpdateReport:
    return UpdateReport(loss, 2.0, 1e-3, skipped, {"clip_frac": 0.5, "entropy": 1.0, "kl/ref": 0.1})


def run_step(telemetry: Telemetry | NodeTelemetry, step: int, loss: float = 0.5) -> None:
    with telemetry.step(step) as record:
        for phase, parts in (
            ("rollout", ("generate", "reward")),
            ("train", ("logprobs", "update")),
            ("sync", ()),
        ):
            with telemetry.span(phase):
                for part in parts:
                    with telemetry.span(part):
                        pass
        telemetry.add({"memory/sync/peak_gb": 1.5})
        gate = {"logprob_diff/mean": 1e-8, "logprob_diff/max": 1e-7, "kl/rollout": float("nan")}
        report = StepReport((update(loss),), {"packing/efficiency": 0.9, **gate})
        record(rolled(groups()), report, PublishReport(step + 1, 3, 100, 7, True, 0.25))


def opened(
    folder: Path, start: int = 0, rank: int = 0, **telemetry: Any
) -> Telemetry | NodeTelemetry:
    config = parse_config(
        {
            "run": {"dir": str(folder.parent), "name": folder.name},
            "train": {"steps": 4},
            "telemetry": telemetry,
        }
    )
    facts = {"world_size": 2, "layout": "tp2"}
    return (
        NodeTelemetry() if rank else Telemetry(config, start=start, interactive=False, facts=facts)
    )


def test_rollout_metrics_by_hand() -> None:
    metrics = rollout_metrics(rolled(groups()))
    assert metrics["reward/mean"] == metrics["reward/accuracy/mean"] == 0.75
    mixed, flat = groups()
    named = replace(
        mixed, samples=(replace(mixed.samples[0], rewards={"format": 0.5}), mixed.samples[1])
    )
    means = rollout_metrics(rolled([named, flat]))
    assert means["reward/format/mean"] == 0.5, "of the samples that have it"
    assert means["reward/accuracy/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/std"] == pytest.approx((0.75 * 0.25) ** 0.5)
    assert metrics["reward/frac_zero_std"] == 0.5
    assert metrics["length/mean"] == 3.5
    assert metrics["length/truncated_frac"] == 0.25
    assert staleness_metrics([], 3) == {}
    late = replace(sample(0, 0, 1.0, 2), versions=torch.tensor([-1, -1, 1, 3]).int())
    assert staleness_metrics([Group(Prompt(0, (0, 1), ""), (late,))], 3) == {
        "staleness/mean": 1.0,
        "staleness/max": 2,
    }
    assert metrics["samples/dropped"] == 1
    assert metrics["rollout/digest"] == "ab"


def test_what_was_sampled_has_means_of_its_own() -> None:
    """Beside those of the groups that are trained on, which a filter chose."""
    mixed, flat = groups()
    metrics = rollout_metrics(replace(rolled([mixed]), generated=(flat, mixed)))
    means = ("reward/mean", "length/mean", "length/truncated_frac")
    assert [metrics[name] for name in means] == [0.5, 4.0, 0.5]
    sampled = [metrics[name.replace("/", "/sampled/")] for name in means]
    assert sampled == [0.75, 3.5, 0.25] and metrics["reward/frac_zero_std"] == 0.5


def test_spread_is_of_all_that_was_generated() -> None:
    def spread(generated: list[Group]) -> list[float]:
        metrics = rollout_metrics(replace(rolled(groups()), generated=tuple(generated)))
        return [metrics.get(name) for name in ("reward/frac_zero_std", "groups/singleton")]

    none = rollout_metrics(replace(rolled(groups()), generated=()))
    assert none["reward/sampled/mean"] is none["length/sampled/truncated_frac"] is None

    assert spread(groups()) == [0.5, 0]
    assert spread([replace(groups()[0], samples=groups()[0].samples[:1])]) == [1.0, 1]
    assert spread([])[0] is None


def test_the_greedy_baseline_is_told_where_there_is_one() -> None:
    assert "reward/baseline" not in rollout_metrics(rolled(groups()))
    assert (
        rollout_metrics(rolled([replace(group, baseline=0.25) for group in groups()]))[
            "reward/baseline"
        ]
        == 0.25
    )


def test_an_empty_step_has_every_documented_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = opened(tmp_path)
    with telemetry.step(0) as record:
        empty = rolled([], **{"rollout/empty": 1, "samples/dropped": 8})
        record(empty, StepReport((UpdateReport(0.0, 0.0, 1e-6, skipped=True),)), None)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    measured = (
        "logprob_diff",
        "weights/",
        "time/",
        "kl/rollout",
        "tokens_per_second",
        "packing",
        "reward/accuracy",
    )
    assert {key for key in DOCUMENTED if not key.startswith(measured)} <= set(line)
    assert line["reward/mean"] is line["entropy"] is None and line["update/skipped"] == 1
    telemetry.close()


def test_update_metrics_by_hand() -> None:
    metrics = update_metrics(StepReport((update(1.0), update(3.0, skipped=True))))
    assert (
        metrics["loss"],
        metrics["update/skipped"],
        metrics["updates"],
        metrics["clip_frac"],
    ) == (2.0, 1, 2, 0.5)
    assert update_metrics(StepReport(())) == {"updates": 0, "update/skipped": 0}


def test_a_line_has_every_documented_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = opened(tmp_path)
    run_step(telemetry, 0)
    # flushed: readable while the run goes on
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert set(DOCUMENTED) <= set(line), set(DOCUMENTED) - set(line)
    assert line["kl/rollout"] is None, "JSON has no NaN"
    assert (line["time/publish"], line["weights/verified"], line["weights/bytes_received"]) == (
        0.25,
        True,
        7,
    )
    said = capsys.readouterr().out
    assert "1/4" in said
    assert all(word in said for word in ("reward 0.750", "log-prob diff 1.0e-07", "tokens/s"))
    rollouts = [
        json.loads(text)
        for text in (tmp_path / "rollouts" / "step_000000.jsonl").read_text().splitlines()
    ]
    assert [row["response"] for row in rollouts] == ["said 0", "said 1"] * 2
    telemetry.close()


def test_metrics_added_in_one_step_do_not_reach_the_next(tmp_path: Path) -> None:
    telemetry = opened(tmp_path)
    run_step(telemetry, 0)
    with telemetry.step(1) as record:
        record(None, StepReport((update(1.0),)), None)
    telemetry.close()
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert not {"rollout/digest", "time/generate", "reward/mean", "memory/sync/peak_gb"} & set(last)


def test_resume_drops_the_steps_done_again_and_a_torn_line(tmp_path: Path) -> None:
    telemetry = opened(tmp_path)
    for step in range(3):
        run_step(telemetry, step, loss=1.0)
    telemetry.close()
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 3, "lo')
    telemetry = opened(tmp_path, start=2)
    run_step(telemetry, 2, loss=9.0)
    telemetry.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (0, 1),
        (1, 1),
        (2, 9),
    ]
    telemetry = opened(tmp_path)
    telemetry.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [], "a run from the start has no past"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    silent = opened(tmp_path / "x", rank=1, tensorboard=True)
    run_step(silent, 0)
    silent.close()
    assert not (tmp_path / "x").exists()


def test_speed_per_gpu_and_share_of_the_peak(tmp_path: Path) -> None:
    telemetry = opened(tmp_path)  # two ranks
    known = replace(update(0.5), tokens=600, flops=7 * 10**12, peak_flops=2e15)
    for updates in ((known, known), (replace(known, peak_flops=0.0),), ()):
        with telemetry.step(0) as record:
            with telemetry.span("train"), telemetry.span("update"):
                time.sleep(0.01)
            record(None, StepReport(updates), None)
    telemetry.close()
    row, on_a_cpu, without_updates = read_metrics(tmp_path / "metrics.jsonl")
    assert row["perf/tokens_per_gpu_second"] * row["time/step"] * 2 == pytest.approx(1200)
    assert row["perf/mfu"] * row["time/update"] * 2e15 == pytest.approx(14e12)
    assert "perf/mfu" not in on_a_cpu and on_a_cpu["perf/tokens_per_gpu_second"] > 0
    assert not [key for key in without_updates if key.startswith("perf/")]


def test_a_profile_of_some_steps(tmp_path: Path) -> None:
    for start, profiled in ((0, 2), (2, 1), (3, 0)):
        file = tmp_path / f"profile_{start}.json"
        telemetry = NodeTelemetry(profiler=open_profiler(file, 1, 2, start))
        for step in range(start, 5):
            with telemetry.step(step):
                torch.ones(2 + step).cumsum(0)
            assert file.is_file() == (step >= 2 and profiled > 0)
        telemetry.close()
        names = []
        if profiled:
            names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert names.count("aten::cumsum") == profiled


def test_a_profile_is_written_if_the_run_ends_before(tmp_path: Path) -> None:
    telemetry = NodeTelemetry(profiler=open_profiler(tmp_path / "p.json", 1, 9, 1))
    with telemetry.step(1):
        torch.ones(2).cumsum(0)
    telemetry.close()
    assert "aten::cumsum" in (tmp_path / "p.json").read_text()


def test_every_node_has_a_timeline_and_its_gpus_are_counted(tmp_path: Path) -> None:
    class Gpus:
        def __init__(self, mean: float, peak: float) -> None:
            self.values = {"gpu/power_w/mean": mean, "gpu/power_w/max": peak}

        def take(self) -> dict[str, float]:
            return self.values

        def close(self) -> None: ...

    first, second = Gpus(300.0, 400.0), Gpus(500.0, 600.0)
    gathered = []

    def gather(metrics: Any) -> list[Any]:
        gathered.append(metrics)
        return [first.values, {}, second.values, {}]

    file = tmp_path / "timeline_node1.json"
    other = NodeTelemetry(Timeline(file, 1), gpus=second, gather=gather)
    run_step(other, 0)
    other.close()
    assert gathered == [second.values]
    spans = json.loads(file.read_text())
    assert {"step 0", "update"} <= {span["name"] for span in spans}
    assert {span["pid"] for span in spans} == {1}

    config = parse_config({"run": {"dir": str(tmp_path), "name": "run"}})
    (tmp_path / "run").mkdir()
    facts = {"world_size": 4, "layout": "1"}
    main = log.Telemetry(config, start=0, interactive=False, facts=facts, gpus=first, gather=gather)
    run_step(main, 0)
    main.close()
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (row["gpu/power_w/mean"], row["gpu/power_w/max"]) == (400.0, 600.0)
    assert (
        abs(json.loads((tmp_path / "run" / "timeline.json").read_text())[0]["ts"] - spans[0]["ts"])
        < 6e7
    )


def test_a_step_in_the_metrics_is_in_the_timeline(tmp_path: Path) -> None:
    telemetry = opened(tmp_path)
    with telemetry.step(0) as record:
        with telemetry.span("update"):
            pass
        record(None, StepReport((update(0.5),)), None)
        assert (tmp_path / "metrics.jsonl").read_text()
        assert [
            event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())
        ] == ["update"]
    telemetry.close()


def test_timeline_is_whole_json_after_every_flush(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for count in range(3):
        assert len(json.loads((tmp_path / "timeline.json").read_text())) == 2 * count
        with timeline.span("outer"):
            with timeline.span("inner"):
                pass
            assert len(json.loads((tmp_path / "timeline.json").read_text())) == 2 * count
    inner, outer = json.loads((tmp_path / "timeline.json").read_text())[-2:]
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"]
    assert outer["dur"] >= inner["dur"]
    with pytest.raises(KeyError), timeline.span("fails"):
        raise KeyError
    assert "fails" in timeline.seconds, "time spent in what failed is shown too"


def test_the_timeline_is_begun_anew_when_it_is_large(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 2000)
    timeline = Timeline(tmp_path / "timeline.json")
    for step in range(100):
        with timeline.span(f"step {step}"):
            pass
        timeline.flush()
    timeline.close()
    parts = [tmp_path / name for name in ("timeline_before.json", "timeline.json")]
    names = [event["name"] for part in parts for event in json.loads(part.read_text())]
    assert names == [f"step {step}" for step in range(100 - len(names), 100)] and len(names) > 20
    assert all(part.stat().st_size < 2200 for part in parts)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_report_shows_curves_and_text(tmp_path: Path) -> None:
    telemetry = opened(tmp_path)
    for step in range(4):
        run_step(telemetry, step)
    telemetry.close()
    (tmp_path / "eval.jsonl").write_text(
        '{"step": 0, "size": 8, "accuracy": 0.25}\n{"step": 4, "size": 8, "accuracy": 0.5}\n'
    )
    page = write_report(tmp_path).read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "ask &lt;0&gt;" in page, "sampled text is text, not markup"
    assert page.count("<svg") >= 5
    assert "Held-out problems" in page
    assert not list(tmp_path.glob(".report*"))


def test_the_report_survives_odd_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no finished step"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "logprob_diff/max": 0.0, "grad_norm": null}\n'
    )
    write_report(tmp_path)


def test_brief_prefers_reward_to_loss() -> None:
    assert brief({"loss": 1.0, "accuracy/sampled": 0.5}) == "accuracy 0.500  loss 1.0000"
    assert brief({"loss": 0.5, "rewards/margin": -0.25}) == "loss 0.5000  margin -0.2500"
    assert "loss" not in brief({"loss": 1.0, "reward/mean": 0.5})


def test_a_report_is_drawn_without_torch() -> None:
    import subprocess

    code = "import megarl.telemetry.report, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_metric_reaches_the_trackers_at_its_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    telemetry = opened(tmp_path, tensorboard=True)
    telemetry.evaluated(0, {"step": 0, "size": 8, "accuracy": 0.5})
    for step in range(2):
        run_step(telemetry, step, loss=float(step))
    telemetry.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        numbers = {
            key: value
            for key, value in row.items()
            if isinstance(value, int | float) and key != "step"
        }
        for name, value in numbers.items():
            assert events.Scalars(name)[row["step"]].step == row["step"]
            assert events.Scalars(name)[row["step"]].value == pytest.approx(float(value))
    assert {"loss", "time/step", "weights/verified", "memory/sync/peak_gb"} <= set(
        events.Tags()["scalars"]
    )
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(0, 0.5)]


def test_samples_have_their_advantages(tmp_path: Path) -> None:
    telemetry = opened(tmp_path, rollouts={"max_samples": 3})
    batch = collate(groups(), temperature=1.0)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    scored = ScoredBatch(
        **fields, advantages=batch.mask * 2.0, old_logprobs=None, ref_logprobs=None, kl_coef=0.0
    )
    with telemetry.step(0) as record:
        record(rolled(groups()), StepReport((update(0.5),)), None, scored)
    telemetry.close()
    lines = (tmp_path / "rollouts" / "step_000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["advantage"] for line in lines] == [2.0] * 3
