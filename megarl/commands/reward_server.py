"""`megarl serve-reward FOLDER`: a reward model behind HTTP; the protocol is rewards/remote.py's.

    rewards: [{name: "http://localhost:8000/score", options: {tokens: true}}]

It scores as the reward `model` does: the request's tokens, or else the prompt in the model's chat
template and the response, with the end token if `finish` is "stop". One process, on its first GPU
or the CPU, answers one request at a time, and a malformed one with status 400 and the reason.
SIGTERM ends it with exit code 0.
"""

import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from json import dumps
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt

from megarl.config.schema import Config
from megarl.data.tokenizer import Tokenizer
from megarl.platform.env import LOOPBACK, Env, set_env
from megarl.processes.exit_codes import CurrentPhase
from megarl.rewards.model import ModelReward
from megarl.run.context import open_rank
from megarl.run.models import make_trainer, model_reward
from megarl.trainer.heads import load_head
from megarl.types import Finish, Sample

MAX_BYTES = 64 << 20  # of a request
IDLE_S = 10.0  # a connection that sends nothing for so long is closed, since others wait


class SampleToScore(BaseModel):
    id: str
    prompt: str
    response: str
    finish: Finish
    tokens: list[NonNegativeInt] = []  # of prompt and response
    prompt_length: NonNegativeInt | None = None  # of `tokens`


class ScoreCall(BaseModel):
    samples: list[SampleToScore]


class Listener(HTTPServer):
    # connections of a client that wait; with the default of 5, the others would time out
    request_queue_size = 128


def score_rows(
    reward: ModelReward, tokenizer: Tokenizer, vocab: int, rows: list[SampleToScore]
) -> list[dict[str, Any]]:
    """Returns the entries of an answer, in order.

    Raises ValueError for a row that cannot be scored.
    """
    samples = []
    for index, row in enumerate(rows):
        prompt = tokenizer.encode_prompt(row.prompt, None)
        response = tokenizer.encode_answer(row.response)
        if row.finish != "stop" and response and response[-1] in tokenizer.eos:
            response = response[:-1]
        tokens = row.tokens or [*prompt, *response]
        if not tokens or max(tokens) >= vocab:
            raise ValueError(
                f"samples.{index}: tokens must be one or more of 0..{vocab - 1}, "
                f"not {str(tokens)[:60]}"
            )
        start = row.prompt_length
        if start is None:
            start = len(prompt)
        trainable = torch.arange(len(tokens)) >= start
        zeros = torch.zeros(len(tokens))
        unread = (zeros, zeros.int())  # log-probs and versions
        sample = Sample(0, index, torch.tensor(tokens), trainable, *unread, row.finish, reward=0.0)
        samples.append(sample)
    entries = []
    for row, scored in zip(rows, reward(samples), strict=True):
        entry = {"id": row.id, "score": scored.reward}
        if scored.reward is None:
            entry = {"id": row.id, "error": "NaN"}
        entries.append(entry)
    return entries


def serve_reward(folder: Path, *, host: str, port: int, dtype: str) -> None:
    """Serves until it is interrupted.

    Raises ValueError if the folder has no reward model of whole responses.
    """
    head = load_head(folder)
    if head.kind == "process":
        raise ValueError(
            f"{folder} scores steps, which a server cannot; use the reward `model` in the run"
        )
    set_env(**LOOPBACK)
    config = Config.model_validate({"model": {"path": str(folder)}, "train": {"dtype": dtype}})
    with open_rank(config, Env(), CurrentPhase()) as rank:
        reward = model_reward(make_trainer(rank, head=head), head, 1.0, "paragraph", rank.tokenizer)

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_S

            def do_POST(self) -> None:
                try:
                    length = int(self.headers.get("Content-Length", -1))
                    if not 0 <= length <= MAX_BYTES:
                        raise ValueError(f"Content-Length={length} is not within 0 and {MAX_BYTES}")
                    rows = ScoreCall.model_validate_json(self.rfile.read(length)).samples
                    status = 200
                    answer = {"scores": score_rows(reward, rank.tokenizer, rank.shape.vocab, rows)}
                except ValueError as error:  # pydantic's has several lines
                    status = 400
                    answer = {"error": " ".join(str(error).split())[:500]}
                body = dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        try:
            listener = Listener((host, port), Handler)
        except OSError as error:
            raise ValueError(
                f"--host={host} --port={port} is refused ({error.strerror}); choose others"
            ) from None
        with listener:
            signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit())
            print(f"megarl: {folder} is served at {host}:{listener.server_port}/score", flush=True)
            listener.serve_forever()
