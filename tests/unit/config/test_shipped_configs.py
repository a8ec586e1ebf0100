"""Every config of the repository can start: a dry run; and its memory adds up."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_plan import SHIPPED, head
from megarl.commands.random_model import create_model
from megarl.config.load import load_config
from megarl.config.schema import Create
from megarl.layout import Layout
from megarl.models.registry import hf_shapes, megatron_table, padded_vocab, read_model
from megarl.models.shards import slices_of
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import ScoreRequest
from tests.hub import Hub, Repo, serve_hub

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(
    path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.yaml")
)
EXAMPLES = [path for path in CONFIGS if path.is_relative_to(ROOT / "examples")]
MODELS = {
    "Qwen/Qwen3-8B": "qwen3_8b",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3_235b_a22b",
}
MATHS: list[dict[str, Any]] = [
    {"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)
]
META = [
    {"query": row["problem"], "response": f"Add. The answer is: {row['answer']}"} for row in MATHS
]
CHAT = [{"context_messages": [{"role": "user", "content": row["problem"]}]} for row in MATHS]
DATASETS = {
    "agentica-org/DeepScaleR-Preview-Dataset": ("train.jsonl", MATHS),
    "HuggingFaceH4/MATH-500": ("test.jsonl", MATHS[:5]),
    "HuggingFaceH4/aime_2024": ("train.jsonl", MATHS[:5]),
    "meta-math/MetaMathQA": ("train.jsonl", META),
    "OpenRLHF/prompt-collection-v0.1": ("train.jsonl", CHAT),
}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking %}<think>{% endif %}"
)
PROGRAM = """
import json, sys
from megarl.cli import main
sys.exit(sum(main(["train", *each, "--dry-run"]) != 0 for each in json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    tiny = create_model(Create(), tmp_path_factory.mktemp("tokenizer"))
    settings = json.loads((tiny / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    tokenizer = {"tokenizer.json": (tiny / "tokenizer.json").read_bytes()}
    tokenizer["tokenizer_config.json"] = json.dumps(settings).encode()
    models = {
        name: Repo(
            tokenizer
            | {"config.json": (ROOT / "configs" / "models" / folder / "config.json").read_bytes()}
        )
        for name, folder in MODELS.items()
    }
    datasets = {
        name: Repo({file: "".join(json.dumps(row) + "\n" for row in rows).encode()})
        for name, (file, rows) in DATASETS.items()
    }
    with serve_hub(models, datasets) as hub:
        yield hub


def test_every_config_passes_a_dry_run(hub: Hub, tmp_path: Path) -> None:
    # in place of what a script or an earlier run makes
    model = create_model(Create(), tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    runs = []
    for file in CONFIGS:
        config = load_config(file, [])
        is_made = config.model.path is not None and config.model.path not in MODELS
        is_made &= not config.model.path or not (ROOT / config.model.path / "config.json").is_file()
        made = [f"model.path={model}"] * is_made + [f"teacher.model={model}"] * (
            config.teacher is not None
        )
        runs += [[str(file), f"run.dir={tmp_path}", *made]]
    assert len(runs) >= 16
    command = [sys.executable, "-c", PROGRAM, json.dumps(runs)]
    done = subprocess.run(
        command, cwd=ROOT, env=hub.env(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("processes  ") == len(runs)


def test_no_config_doubles_another() -> None:
    seen = dict[str, Path]()
    for file in CONFIGS:
        settings = load_config(file, []).model_dump(mode="json", exclude={"run"})
        text = json.dumps(settings)
        assert text not in seen, f"{file} and {seen[text]}"
        seen[text] = file


@pytest.mark.parametrize(
    "folder", [path.parent for path in EXAMPLES], ids=[path.parent.name for path in EXAMPLES]
)
def test_an_example_is_a_page_and_one_config(folder: Path) -> None:
    name, page = folder.name, (folder / "README.md").read_text()
    assert [file.name for file in folder.glob("*.yaml")] == [f"{name}.yaml"]
    assert len(page.splitlines()) <= 40
    assert f"megarl train examples/{name}/{name}.yaml" in page
    assert f"({name}/README.md)" in (ROOT / "examples" / "README.md").read_text()


def test_the_problems_of_the_code_reward_can_be_solved() -> None:
    config = load_config(ROOT / "examples/code_reward/code_reward.yaml", [])
    [reward] = make_rewards(list(config.rewards))
    rows = (ROOT / "examples/code_reward/problems.jsonl").read_text().splitlines()
    requests = []
    for number, row in enumerate(map(json.loads, rows)):
        for kind, code in (("right", row["solution"]), ("wrong", "print('no')")):
            response = f"```python\n{code}```"
            requests.append(
                ScoreRequest(
                    f"{number}/{kind}", row["prompt"], response, extra={"tests": row["tests"]}
                )
            )
    scores = reward(requests)
    assert [score.value for score in scores] == [1.0, 0.0] * len(rows)


LARGE = [
    "examples/math_8gpu/math_8gpu.yaml",
    "configs/gpu/qwen3_30b_a3b_8gpu.yaml",
    "configs/gpu/qwen3_235b_a22b_64gpu.yaml",
]


@pytest.mark.parametrize("name", LARGE)
def test_host_memory_of_the_page_is_that_of_the_configs(name: str) -> None:
    """Per node: what is offloaded of 8 of the largest ranks; and once of each parameter, what a checkpoint has."""
    config = load_config(ROOT / name, [])
    assert config.model.path is not None and config.launch.processes is not None
    shape = read_model(ROOT / "configs" / "models" / MODELS[config.model.path])
    world = config.launch.processes
    table = megatron_table(
        shape, spec="te", padded_vocab=padded_vocab(shape.vocab, config.parallel.tensor)
    )
    offloaded = 0.0
    for rank in range(world):
        layout = Layout.of(config.parallel.sizes, world, rank)
        slices = slices_of(table, shape, layout)
        experts = sum(part.numel for part in slices if ".experts." in part.name)
        others = sum(part.numel for part in slices) - experts
        adam = 12 * (experts / layout.edp.size + others / (layout.dp.size * layout.cp.size))
        weights = 2 * (experts + others) * ("weights" in config.train.offload)
        offloaded = max(offloaded, 8 * (adam + weights) / 1e9)
    total = sum(math.prod(size) for size in hf_shapes(shape).values())
    copied = (2 + 4 + 4 + 4) * total / (world / 8) / 1e9  # weights, fp32 weights, two moments
    page = (ROOT / "docs/guides/large_models.md").read_text()
    row = re.search(rf"^\| `{name}` \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert row
    written = [int(number) for number in row.groups()]
    # sums are of rounded numbers, as in the configs
    assert written[:2] == pytest.approx([offloaded, copied], rel=0.003), (offloaded, copied)
    assert written[0] + written[1] == written[2]


@pytest.mark.parametrize("file", SHIPPED)
def test_the_head_of_a_config_is_its_plan_of_memory(file: str) -> None:
    """Written by `python -m benchmarks.memory_plan --heads`."""
    assert head(file) in (ROOT / file).read_text()


def test_configs_of_several_nodes_name_their_gpu() -> None:
    named = [str(file.relative_to(ROOT)) for file in CONFIGS if load_config(file, []).launch.gpu]
    several = [
        str(file.relative_to(ROOT))
        for file in CONFIGS
        if (load_config(file, []).launch.processes or 0) > 8
    ]
    assert {*several} <= {*named} <= {*SHIPPED} and len(several) == 7
