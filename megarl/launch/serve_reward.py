"""`megarl serve-reward FOLDER`: a reward model behind HTTP, in the protocol of megarl/rewards/remote.py.

    rewards: [{name: "http://localhost:8000/score", options: {tokens: true}}]

It scores as the reward `model` does: the request's tokens, or else the prompt in the model's chat template and the
response, with the end token if `finish` is "stop". One process, on its first GPU or the CPU.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.data.tokenizer import Tokenizer
from megarl.launch.build import Rank, make_trainer
from megarl.launch.reward_models import model_reward
from megarl.platform.device import pick_device
from megarl.platform.env import Env
from megarl.rewards.model import ModelReward
from megarl.trainer.heads import load_head
from megarl.types import Sample

MAX_BYTES = 64 << 20  # of a request


def score_rows(reward: ModelReward, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entries of an answer, in order. Raises KeyError, TypeError or ValueError for a malformed request."""
    samples = []
    for index, row in enumerate(rows):
        prompt, response = tokenizer.encode_prompt(row["prompt"], None), tokenizer.encode_answer(row["response"])
        cut = len(response) - (row["finish"] != "stop" and response[-1:] in [(end,) for end in tokenizer.eos])
        tokens = torch.tensor(row.get("tokens") or [*prompt, *response[:cut]])
        trainable = torch.arange(len(tokens)) >= len(prompt)
        samples.append(Sample(0, index, tokens, trainable, torch.zeros(len(tokens)), (0, 0), row["finish"], reward=0.0))
    entries = [{"error": "NaN"} if scored.reward is None else {"score": scored.reward} for scored in reward(samples)]
    return [{"id": row["id"], **entry} for row, entry in zip(rows, entries, strict=True)]


def serve_reward(folder: Path, *, host: str, port: int, dtype: str) -> None:
    """Serves until it is interrupted. Raises ValueError if the folder has no reward model of whole responses."""
    if (head := load_head(folder)).kind == "process":
        raise ValueError(
            f"{folder} scores steps, which `megarl serve-reward` cannot; use the reward `model` in the run"
        )
    device = pick_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    config = Config.model_validate({"model": {"path": str(folder)}, "train": {"dtype": dtype}})
    rank = Rank.of(config, Env(), device)
    reward = model_reward(make_trainer(rank, head=head), head, 1.0, "paragraph", rank.tokenizer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", -1))
                if not 0 <= length <= MAX_BYTES:
                    raise ValueError(f"Content-Length={length} is not within 0 and {MAX_BYTES}")
                rows = json.loads(self.rfile.read(length))["samples"]
                status, answer = 200, {"scores": score_rows(reward, rank.tokenizer, rows)}
            except (IndexError, KeyError, TypeError, ValueError) as error:
                status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer((host, port), Handler) as listening:
        print(f"megarl: {folder} is served at {host}:{listening.server_port}/score", flush=True)
        listening.serve_forever()
