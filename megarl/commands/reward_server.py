"""The server of `megarl serve-reward FOLDER`: scores responses with a reward model over HTTP.

    rewards: [{name: "http://localhost:8000/score", options: {tokens: true}}]

    clients --uvicorn, event loop--> app: complete requests --one thread--> scores, one at a time

The protocol is that of rewards/remote.py, and scores are those of the reward `model`. A row is the
request's tokens, if given; otherwise the encoded prompt and response, with the end token if
`finish` is "stop". One process, on its first GPU or the CPU, scores requests one after another. A
malformed request gets status 400 and the reason. The size and the time of a request are limited, so
a slow client does not delay others. SIGTERM ends the server with exit code 0 after the request that
is being scored.
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

MAX_BYTES = 64 << 20  # maximum size of a request
MAX_CONNECTIONS = 256  # concurrent connections; others get status 503, which a run retries
HEADERS_S = 10.0  # time limit to send headers, and after SIGTERM to finish all connections
BODY_S = 60.0  # time limit to send the body, and again to read the answer


class SampleToScore(BaseModel):
    id: str
    prompt: str
    response: str
    finish: Finish
    tokens: list[NonNegativeInt] = []  # prompt and response
    prompt_length: NonNegativeInt | None = None  # number of prompt tokens in `tokens`


class ScoreCall(BaseModel):
    samples: list[SampleToScore]


def score_rows(
    reward: ModelReward, tokenizer: Tokenizer, vocab: int, rows: list[SampleToScore]
) -> list[dict[str, Any]]:
    """Scores rows; returns {"id", "score"} or {"id", "error"} for each, in order.

    `vocab` is the model's vocabulary size. Raises ValueError for a row with invalid tokens.
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
    """An HTTP connection for one request, closed if the client exceeds a time limit."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, lambda: self.cycle or transport.abort())

    def on_response_complete(self) -> None:
        self.loop.call_later(BODY_S, self.transport.abort)


def make_server(score: Callable[[list[SampleToScore]], list[dict[str, Any]]]) -> uvicorn.Server:
    """Returns a server that reads requests concurrently and scores them one after another."""
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
            status = 400  # pydantic's message has several lines: join them
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
    """Returns the body of a request; raises ValueError if it exceeds MAX_BYTES."""
    body = bytearray()
    length = int(request.headers.get("content-length", 0))
    chunks = request.stream()
    while length <= MAX_BYTES and (chunk := await anext(chunks)):  # the last chunk is empty
        body += chunk
        length = max(length, len(body))
    if length > MAX_BYTES:
        raise ValueError(f"Content-Length={length} is not within 0 and {MAX_BYTES}")
    return bytes(body)


def serve_reward(folder: Path, *, host: str, port: int, dtype: str) -> None:
    """Loads the reward model in `folder` and serves it until interrupted.

    Raises ValueError if the folder has no outcome reward model, or if the address is unavailable.
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
            # uvicorn stops on the signal, and then raises it again
            signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit())
            bound_port = listener.getsockname()[1]
            print(f"megarl: {folder} is served at {host}:{bound_port}/score", flush=True)
            make_server(score).run(sockets=[listener])
