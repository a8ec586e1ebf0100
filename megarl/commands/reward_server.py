"""`megarl serve-reward FOLDER`: a reward model behind HTTP; the protocol is rewards/remote.py's.

    rewards: [{name: "http://localhost:8000/score", options: {tokens: true}}]

    clients --uvicorn, an event loop--> App: whole requests --a thread--> scores, one at a time

It scores as the reward `model` does: the request's tokens, or else the prompt in the model's chat
template and the response, with the end token if `finish` is "stop". One process, on its first GPU
or the CPU, answers requests in turn, and a malformed one with status 400 and the reason. Size and
time of a request are limited, so a slow client holds up no other. SIGTERM ends the server, after
the request that is being scored, with exit code 0.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from pydantic import BaseModel, NonNegativeInt
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

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
MAX_CONNECTIONS = 256  # at the same time; status 503 beyond, which a run tries again
HEADERS_S = 10.0  # until a connection has sent its headers; at SIGTERM, until all have ended
BODY_S = 60.0  # until it has sent its body, and again until it has read the answer


class SampleToScore(BaseModel):
    id: str
    prompt: str
    response: str
    finish: Finish
    tokens: list[NonNegativeInt] = []  # of prompt and response
    prompt_length: NonNegativeInt | None = None  # of `tokens`


class ScoreCall(BaseModel):
    samples: list[SampleToScore]


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
        elif start > len(tokens):
            raise ValueError(f"samples.{index}: prompt_length={start} exceeds {len(tokens)} tokens")
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


class Connection(H11Protocol):
    """A connection for one request, which is closed if its client is late."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, lambda: self.cycle or transport.abort())

    def on_response_complete(self) -> None:
        self.loop.call_later(BODY_S, self.transport.abort)


def make_server(score: Callable[[list[SampleToScore]], list[dict[str, Any]]]) -> uvicorn.Server:
    """Returns a server that reads requests side by side, and scores them in turn."""
    worker = ThreadPoolExecutor(1)

    def answer(body: bytes) -> dict[str, Any]:
        return {"scores": score(ScoreCall.model_validate_json(body).samples)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = 200
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(Request(scope, receive))
            content = await asyncio.get_running_loop().run_in_executor(worker, answer, body)
        except (ClientDisconnect, TimeoutError, ValueError) as error:
            status = 400  # pydantic's text has several lines
            text = " ".join(str(error).split())[:500]
            content = {"error": text or f"the request did not arrive within {BODY_S:g} s"}
        await JSONResponse(content, status, {"connection": "close"})(scope, receive, send)

    options = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(HEADERS_S),
    )
    return uvicorn.Server(options)


async def _read(request: Request) -> bytes:
    """Returns the body of a request. Raises ValueError if it is too large."""
    body = bytearray()
    length = int(request.headers.get("content-length", 0))
    chunks = request.stream()
    while length <= MAX_BYTES and (chunk := await anext(chunks)):  # the last one is empty
        body += chunk
        length = max(length, len(body))
    if length > MAX_BYTES:
        raise ValueError(f"Content-Length={length} is not within 0 and {MAX_BYTES}")
    return bytes(body)


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
        score = partial(score_rows, reward, rank.tokenizer, rank.shape.vocab)
        try:
            listener = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ValueError(
                f"--host={host} --port={port} is refused ({error.strerror}); choose others"
            ) from None
        with listener:
            # uvicorn stops at the signal, and then raises it again
            signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit())
            bound_port = listener.getsockname()[1]
            print(f"megarl: {folder} is served at {host}:{bound_port}/score", flush=True)
            make_server(score).run(sockets=[listener])
