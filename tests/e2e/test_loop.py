"""The whole loop, real Megatron-Core and real vLLM: every layout says the same, and a refusal is said once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from start_ranks import run_ranks

from megarl.commands.random_model import create_model
from megarl.config.load import load_config
from megarl.config.schema import Create
from megarl.data.tasks import random_tokens
from tests.hub import Repo, serve_hub

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained_tokens(row: dict) -> float:
    return row["perf/tokens_per_gpu_second"] * row["time/step"] * row["world_size"]


def train(
    folder: Path,
    config: str,
    *overrides: str,
    command: str = "train",
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    args = [
        sys.executable,
        "-m",
        "megarl.cli",
        command,
        f"configs/{config}.yaml",
        f"run.dir={folder}",
        *overrides,
    ]
    return subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A number of ranks, every case one after the other; once, as pytest makes parametrized fixtures anew."""

    @cache
    def launch(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("loop")
        run_ranks(HERE / "loop_ranks.py", ranks, str(folder), timeout_s=540)
        return folder

    return launch


@pytest.fixture
def runs(launched: Callable[[int], Path], request: pytest.FixtureRequest) -> Path:
    return launched(request.param)


CASES = {  # ranks -> [(model, objective, how many layouts)]
    2: [("tiny_dense", "", 5), ("tiny_dense", "-rpp", 2), ("tiny_moe", "", 3)],
    4: [
        ("tiny_dense", "", 5),
        ("tiny_dense", "-rpp", 2),
        ("tiny_moe", "", 6),
        ("tiny_moe", "-rpp", 2),
    ],
}
ON_TWO_RANKS = pytest.mark.parametrize("runs", [2], indirect=True)
FOUR = [
    pytest.mark.long,
    pytest.mark.exhaustive,
]  # tests/dist has layouts of four ranks on every change
ON_BOTH = pytest.mark.parametrize("runs", [2, pytest.param(4, marks=FOUR)], indirect=True)


@pytest.mark.parametrize(
    ("runs", "model", "objective", "count"),
    [
        pytest.param(ranks, *case, marks=FOUR if ranks == 4 else [])
        for ranks, cases in CASES.items()
        for case in cases
    ],
    indirect=["runs"],
)
def test_layouts_agree(runs: Path, model: str, objective: str, count: int) -> None:
    names = [f.name for f in runs.glob(f"{model}-*") if f.name.endswith("-rpp") == bool(objective)]
    assert len(names) == count
    first = rows(runs / f"{model}-dp{objective}")
    assert (
        first[0]["reward/std"] > 0.05
        and first[0]["grad_norm"] > 1e-3
        and first[0]["length/truncated_frac"] < 1
    )
    for name in names:
        here = rows(runs / name)
        assert here[0]["rollout/digest"] == first[0]["rollout/digest"], name
        assert trained_tokens(here[0]) == pytest.approx(trained_tokens(first[0])), name
        for step, tolerance in ((0, 1e-5), (1, 1e-3)):
            for key in ("loss", "grad_norm"):
                # a whitened objective's loss is 0 at step 0, but for rounding: hence `abs`
                expected = pytest.approx(first[step][key], rel=tolerance, abs=1e-7)
                assert here[step][key] == expected, f"{name} step {step} {key}"
        assert all(row["weights/verified"] for row in here), name
        assert max(row["logprob_diff/max"] for row in here) < 1e-4, name


@ON_BOTH
def test_replicas_of_a_parameter_stay_bit_equal(runs: Path) -> None:
    differ = json.loads((runs / "replicas.json").read_text())
    assert len(differ) in (10, 15) and not any(differ.values()), differ


@ON_BOTH
def test_objectives_differ(runs: Path) -> None:
    """The comparison above would also pass if the preset were ignored."""
    grpo, rpp = rows(runs / "tiny_dense-dp"), rows(runs / "tiny_dense-dp-rpp")
    assert grpo[0]["rollout/digest"] == rpp[0]["rollout/digest"]
    assert grpo[0]["grad_norm"] != pytest.approx(rpp[0]["grad_norm"], rel=1e-3)
    assert rpp[0]["kl/ref"] == pytest.approx(0.0, abs=1e-6) and rpp[1]["kl/ref"] > 1e-6


@ON_TWO_RANKS
def test_one_rank_by_the_command_line_says_the_same(runs: Path, tmp_path: Path) -> None:
    """And so does its model on a hub, whose generation_config.json asks for greedy sampling in vain."""
    create = load_config(ROOT / "configs" / "tiny_dense.yaml").model.create
    files = {
        file.name: file.read_bytes()
        for file in create_model(create or Create(), tmp_path / "models").iterdir()
    }
    generation = {
        **json.loads(files["generation_config.json"]),
        "temperature": 0.01,
        "top_k": 1,
        "max_new_tokens": 1,
    }
    repo = Repo(files | {"generation_config.json": json.dumps(generation).encode()})
    evaluated = "eval={every: 2, size: 4, sets: [{name: few, size: 3, samples: 2}]}"
    with serve_hub({"org/tiny": repo}) as hub:
        profile = "telemetry.profile={steps: [1, 1]}"
        overrides = ("model.path=org/tiny", "run.name=one", "train.steps=2", evaluated, profile)
        done = train(runs, "tiny_dense", *overrides, env=hub.env(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert (
        f"path: org/tiny\n  revision: {repo.commit}\n" in (runs / "one" / "config.yaml").read_text()
    )
    trace = json.loads((runs / "one" / "profile_rank0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert any("Backward" in str(name) for name in names) and "aten::mm" in names
    assert all(
        row["perf/tokens_per_gpu_second"] > 0 and "perf/mfu" not in row
        for row in rows(runs / "one")
    )
    evaluations = [
        json.loads(line) for line in (runs / "one" / "eval.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert (evaluations[1]["size"], evaluations[1]["few/size"]) == (4, 3)
    assert (
        evaluations[1]["few/mean@2/low"]
        < evaluations[1]["few/mean@2"]
        < evaluations[1]["few/mean@2/high"]
    )
    one, two = rows(runs / "one"), rows(runs / "tiny_dense-dp")
    assert one[0]["rollout/digest"] == two[0]["rollout/digest"]
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-5)
    assert one[1]["grad_norm"] == pytest.approx(two[1]["grad_norm"], rel=1e-3)


@pytest.mark.long
def test_a_bound_that_cannot_be_met_stops_with_3_and_says_what_it_saw(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "tiny_dense",
        "run.name=refused",
        "checks.max_logprob_diff=1e-9",
        "checkpoint.every=1",
    )
    assert done.returncode == 3, done.stderr
    assert (
        done.stderr.count("\n") == 1 and "1e-09" in done.stderr and "Traceback" not in done.stderr
    )
    assert json.loads((tmp_path / "refused" / "exit.json").read_text())["code"] == 3


@pytest.mark.long
def test_parity_is_measured_and_explained_by_rounding(tmp_path: Path) -> None:
    """In bf16, where trainer and engine differ by a thousand times more than in fp32."""
    done = train(
        tmp_path, "tiny_moe", "--parity", "train.dtype=bf16", "run.name=tiny", command="check"
    )
    assert done.returncode == 0, done.stderr
    figures = re.fullmatch(
        r"\d+ sampled tokens, bf16.*measured +median (\S+), .*floor +median (\S+), .*statistic +(\S+), at most (\S+).*",
        done.stdout,
        re.DOTALL,
    )
    assert figures is not None, done.stdout
    measured, floor, statistic, limit = map(float, figures.groups())
    assert 1e-3 < measured < 0.03 and 1e-3 < floor < 0.03 and statistic < 1
    # with experts, each of the 8 prompts is a draw
    assert limit == pytest.approx(2 * (1 + 2 / 8**0.5) ** 2, rel=1e-2)


@pytest.mark.long
@pytest.mark.exhaustive  # its sync, its updates and its files are tried on every change (tests/dist)
def test_gpt_oss_trains(tmp_path: Path) -> None:
    """Sinks, windows and biased experts over two ranks of trainer and engine; no other family has them."""
    overrides = [
        "run.name=oss",
        "model.create.family=gpt_oss",
        "rollout.tensor=2",
        "parallel.tensor=2",
        "train.steps=2",
    ]
    done = train(tmp_path, "tiny_moe", *overrides)
    assert done.returncode == 0, done.stderr
    for row in rows(tmp_path / "oss"):
        assert row["weights/verified"] and row["logprob_diff/max"] < 1e-4
        assert row["grad_norm"] > 1e-3 and row["reward/std"] > 0.05


@pytest.mark.long
def test_a_prompt_is_computed_once_for_all_its_samples(tmp_path: Path) -> None:
    """As vLLM counts its tokens, but for its last, incomplete block of 32. (The prompts of step 0 are in the cache,
    from the probe.)"""
    overrides = [
        "train.steps=2",
        "task.options={vocab: 67, least: 65, most: 100}",
        "rollout.max_prompt_tokens=100",
    ]
    done = train(tmp_path, "tiny_dense", "run.name=one", "launch.processes=1", *overrides)
    assert done.returncode == 0, done.stderr
    config = load_config(ROOT / "configs" / "tiny_dense.yaml", overrides)
    task = {row["prompt"] for row in random_tokens(split="train", **config.task.options)}
    _, file = sorted((tmp_path / "one" / "rollouts").iterdir())
    prompts = {json.loads(line)["prompt"] for line in file.read_text().splitlines()}
    assert len(prompts) == 8 and prompts <= task
    lengths = [len(prompt.split()) for prompt in prompts]
    expected = sum(length + 7 * (length - 32 * ((length - 1) // 32)) for length in lengths)
    assert rows(tmp_path / "one")[1]["rollout/prompt_tokens_computed"] == expected
    assert expected < 8 * sum(lengths) / 3


@pytest.mark.long
def test_a_stop_text_ends_responses(tmp_path: Path) -> None:
    """A real tokenizer: the text is one token, stays in the response, and what it ends is not truncated."""
    task = "task={name: 'reasoning_gym:chain_sum', system_prompt: Add., answer: tag}"
    overrides = [
        "run.name=stop",
        "model.create.tokenizer=characters",
        "model.create.vocab=32",
        task,
    ]
    overrides += [
        "rollout.stop=['7']",
        "rollout.max_prompt_tokens=200",
        "rollout.engine_options={max_num_batched_tokens: 256}",  # fewer than the prompts of a step
        "rewards=[{name: accuracy}]",
        "train.steps=1",
    ]
    done = train(tmp_path, "tiny_dense", *overrides, "algorithm.filter_zero_std=false")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "stop" / "rollouts").iterdir()
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    stopped = [sample for sample in samples if "7" in sample["response"]]
    assert 10 < len(stopped) < len(samples)
    assert all(sample["response"].index("7") == len(sample["response"]) - 1 for sample in stopped)
    assert all(sample["finish"] == "stop" for sample in stopped)
    lengths = [sample["finish"] == "length" for sample in samples]
    metrics = rows(tmp_path / "stop")[0]
    assert any(lengths) and metrics["length/truncated_frac"] == sum(lengths) / len(samples)
    assert metrics["reward/accuracy/no_answer"] == len(samples), "no response has an <answer>"
