"""Another engine than vLLM: one file, and the line that names it."""

from __future__ import annotations

import json
from pathlib import Path

from start_ranks import start_ranks

PROGRAM = """
import sys
from megarl.cli import main
from megarl.stages import rl
from transformers_engine import TransformersEngine
rl.run = lambda rank: rl.train_policy(rank, TransformersEngine.start)
code = main(["train", *sys.argv[1:]])
assert "vllm" not in sys.modules
sys.exit(code)
"""
CONFIG = Path(__file__).parents[2] / "configs/tiny_dense.yaml"


def test_an_engine_over_plain_transformers_trains(tmp_path: Path) -> None:
    """Two ranks of a trainer in tensor parallel, an engine on each: weights move in shards."""
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}")
    changes = [f"run.dir={tmp_path}", "parallel.tensor=2", "train.steps=2", "eval.every=0"]
    ranks = start_ranks(program, 2, str(CONFIG), *changes)
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    lines = (tmp_path / "tiny_dense/metrics.jsonl").read_text().splitlines()
    for step, metrics in enumerate(map(json.loads, lines)):
        assert metrics["weights/version"] == step + 1 and metrics["weights/verified"]
        assert metrics["weights/bytes"] > 0 and metrics["grad_norm"] > 1e-3
        assert metrics["logprob_diff/statistic"] < metrics["logprob_diff/limit"]
        assert metrics["logprob_diff/max"] < 1e-5
    assert len(lines) == 2
    assert len({metrics["rollout/digest"] for metrics in map(json.loads, lines)}) == 2
