"""Rewards from a server, in batches over HTTP. `scripts/reward_server.py` is a complete server in twenty lines.

    rewards: [{name: "http://host:8000/score", weight: 1.0, options: {timeout_s: 30, retries: 3, batch_size: 32}}]

    POST /score HTTP/1.1
    Content-Type: application/json
    Idempotency-Key: 5b0c...           the same for all attempts of one request

    {"samples": [{"id": "17/0", "prompt": "1 + 1 =", "response": "2", "answer": "2", "finish": "stop", "extra": {}}]}

    HTTP/1.1 200 OK
    {"scores": [{"id": "17/0", "score": 1.0}]}

The answer has one entry per sample, in any order. `score` is a finite number; the entry of a sample that the server
cannot score is {"id": ..., "error": "reason"}. For process rewards a sample has `steps`, a list of texts, and its entry
`steps`, as many numbers. `extra` holds those of the problem's other fields that JSON can represent. With the option
`tokens: true`, `tokens` are the ids of prompt and response, which `megarl serve-reward` then scores; the first
`prompt_length` are the prompt's.

Certificates of https servers are always verified, against SSL_CERT_FILE or else certifi; proxies in the environment are
not used. Secrets belong into the variables that `headers_env` names: URLs with one are refused, and a server's text is
logged without them.

Connections that fail or break, 5xx and 429 (after its Retry-After) are retried after growing random pauses; requests
that exceed `timeout_s`, other statuses and malformed answers are not. A sample without a score is dropped and counted
as reward/<url>/<cause>. Causes for a whole request: no_connection, broken, timeout, http_<status>, too_large, not_json,
bad_answer, unknown_id (an id that was not sent casts doubt on the others); for one sample: missing_id, duplicate_id,
not_a_number, nan, error.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from random import SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import certifi
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.platform.env import SECRET, get_env
from megarl.rewards.interface import (
    UNREACHABLE,
    BatchReward,
    Score,
    ScoreError,
    ScoreRequest,
    parse_options,
    try_score,
)

if TYPE_CHECKING:
    import httpx

Read = Callable[[Any], Any]
MAX_BYTES = 4 << 20  # size limit of an answer
CONNECT_S = 10.0
MAX_PAUSE_S = 60.0
CANCEL_S = 10.0  # for cancelling requests once total_s is up


class _Retryable(ScoreError):
    """A failure that may not recur in another attempt, at least `pause_s` from now."""

    def __init__(self, cause: str, detail: str, pause_s: float = 0.0) -> None:
        super().__init__(cause, detail)
        self.pause_s = pause_s


class HttpOptions(BaseModel):
    """The options of every reward that sends requests."""

    model_config = Section.model_config

    timeout_s: PositiveFloat = 30.0  # of one attempt, from connecting to the answer's last byte
    total_s: PositiveFloat = 300.0  # of all requests of a step together, pauses included
    retries: NonNegativeInt = 3
    backoff_s: PositiveFloat = 0.5  # mean of the first pause; each is twice the one before
    concurrency: PositiveInt = 16  # requests in flight
    headers_env: dict[str, str] = Field(
        default_factory=dict
    )  # {header: environment variable with the secret}


@dataclass(frozen=True)
class HttpClient:
    """Sends JSON to one server, with retries. `ask` may be called from any thread without a running event loop."""

    url: str
    options: HttpOptions
    headers: Mapping[str, str] = field(repr=False)  # may hold secrets
    certificates: ssl.SSLContext = field(repr=False)
    max_bytes: int = MAX_BYTES

    @classmethod
    def of(cls, url: str, options: HttpOptions, *, reward: str) -> HttpClient:
        """Raises ValueError, naming `reward`, if the URL is invalid or the variable of a header is not set."""
        _check_url(url, reward)
        headers = {}
        for header, variable in options.headers_env.items():
            if not re.fullmatch(
                r"[A-Z_][A-Z0-9_]*", variable
            ):  # it may be the secret itself, so it is not shown
                raise ValueError(
                    f"rewards: headers_env[{header!r}] is not the name of an environment variable in capitals, such as "
                    "SCORER_AUTH; export the value, and write the variable's name"
                )
            value = get_env(variable)
            if not value:
                raise ValueError(
                    f"rewards: name={reward!r}: headers_env names {variable}, which is not set; export it"
                )
            if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", value):
                raise ValueError(
                    f"rewards: {variable} has characters that no HTTP header may hold; export it again"
                )
            headers[header] = value
        return cls(
            url, options, headers, _certificates(get_env("SSL_CERT_FILE") or certifi.where())
        )

    def quote(self, value: Any, most: int = 200) -> str:
        """A server's text on one line, cut, and without the values of headers that it may repeat."""
        text = str(value)
        for secret in {
            word for header in self.headers.values() for word in (header, header.split()[-1])
        }:
            text = text.replace(secret, "***")
        return repr(text[:most])

    @property
    def total_s(self) -> float:
        return self.options.total_s + CANCEL_S

    def ask(self, payloads: Sequence[Any], reads: Sequence[Read] = ()) -> list[Any]:
        """Returns the JSON answers in order, or what `reads` make of them; a ScoreError for each failed request."""
        return (
            asyncio.run(self._all(payloads, reads or [lambda answer: answer] * len(payloads)))
            if payloads
            else []
        )

    async def _all(self, payloads: Sequence[Any], reads: Sequence[Read]) -> list[Any]:
        import httpx  # deferred: configs are checked without it

        options = self.options
        slots = asyncio.Semaphore(options.concurrency)
        limits = httpx.Limits(max_connections=options.concurrency)
        timeout = httpx.Timeout(None, connect=min(CONNECT_S, options.timeout_s))
        client = httpx.AsyncClient(
            timeout=timeout,
            limits=limits,
            headers=dict(self.headers),
            verify=self.certificates,
            trust_env=False,
        )
        failed: list[
            _Retryable
        ] = []  # the failure of the last attempt; empty after one that succeeded

        async def one(payload: Any, read: Read) -> Any:
            async with slots:
                try:
                    return read(
                        await self._with_retries(client, failed, json.dumps(payload).encode())
                    )
                except ScoreError as error:
                    return error
                except Exception as error:  # noqa: BLE001 (of the client library; the run goes on)
                    return ScoreError(
                        "error", f"{self.url}: {type(error).__name__}: {self.quote(error)}"
                    )

        async with client:
            tasks = [asyncio.create_task(one(*job)) for job in zip(payloads, reads, strict=True)]
            _, late = await asyncio.wait(tasks, timeout=options.total_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        cause, detail = (
            "timeout",
            f"{self.url} did not answer all requests within total_s={options.total_s}",
        )
        if failed and failed[0].cause in UNREACHABLE:
            cause, detail = (
                failed[0].cause,
                f"{failed[0]} after retries for total_s={options.total_s}",
            )
        out_of_time = ScoreError(cause, detail)
        return [out_of_time if task in late else task.result() for task in tasks]

    async def _with_retries(
        self, client: httpx.AsyncClient, failed: list[_Retryable], body: bytes
    ) -> Any:
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Idempotency-Key": uuid4().hex,
        }
        options = self.options
        for attempt in range(options.retries + 1):
            try:
                async with asyncio.timeout(options.timeout_s):
                    answer = await self._attempt(client, body, headers)
                failed.clear()
                return answer
            except TimeoutError:
                raise ScoreError(
                    "timeout", f"{self.url} took longer than timeout_s={options.timeout_s}"
                ) from None
            except _Retryable as error:
                failed[:] = [error]
                if attempt == options.retries:
                    raise ScoreError(error.cause, f"{error} ({attempt + 1} attempts)") from None
                pause_s = options.backoff_s * 2**attempt * SystemRandom().uniform(0.5, 1.5)
                await asyncio.sleep(min(max(pause_s, error.pause_s), MAX_PAUSE_S))
        raise AssertionError

    async def _attempt(
        self, client: httpx.AsyncClient, body: bytes, headers: Mapping[str, str]
    ) -> Any:
        import httpx

        try:
            async with client.stream("POST", self.url, content=body, headers=headers) as response:
                status = response.status_code
                if status == 429 or status >= 500:
                    pause_s = _retry_after(response.headers.get("Retry-After", ""))
                    raise _Retryable(
                        f"http_{status}", f"{self.url} returned HTTP {status}", pause_s
                    )
                if status != 200:
                    raise ScoreError(f"http_{status}", f"{self.url} returned HTTP {status}")
                return await self._read_json(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Retryable(
                "no_connection", f"{self.url} cannot be reached ({self.quote(error)})"
            ) from None
        except httpx.TransportError as error:
            raise _Retryable(
                "broken", f"the connection to {self.url} failed ({type(error).__name__})"
            ) from None

    async def _read_json(self, response: httpx.Response) -> Any:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self.max_bytes:
                raise ScoreError(
                    "too_large", f"{self.url} returned more than {self.max_bytes} bytes"
                )
        try:
            return json.loads(data)
        except (
            ValueError,
            RecursionError,
        ):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            text = self.quote(bytes(data).decode(errors="replace"), 60)
            raise ScoreError("not_json", f"{self.url} returned {text}, which is not JSON") from None


def _retry_after(header: str) -> float:
    """Seconds to wait according to a Retry-After header (a number or a date); 0 if it is neither."""
    for parse in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with suppress(ValueError, TypeError, OverflowError):
            pause_s = parse(header)
            return pause_s if math.isfinite(pause_s) and pause_s > 0 else 0.0
    return 0.0


def score_batches(
    client: HttpClient, rows: Sequence[Mapping[str, Any]], batch_size: int, *, key: str
) -> list[Any]:
    """Returns the server's value of `key` for each row, or a ScoreError."""
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    answers = client.ask([{"samples": batch} for batch in batches])
    values: dict[str, Any] = {}
    for batch, answer in zip(batches, answers, strict=True):
        values |= _values_by_id(answer, [row["id"] for row in batch], client, key)
    return [values[row["id"]] for row in rows]


def request_row(request: ScoreRequest, *, tokens: bool = False) -> dict[str, Any]:
    """Returns a request as a JSON object, without the problem's fields that JSON cannot represent."""
    row = {
        name: getattr(request, name) for name in ("id", "prompt", "response", "answer", "finish")
    }
    row["extra"] = {str(key): value for key, value in request.extra.items() if _is_json(value)}
    if tokens:
        row |= {
            "tokens": [*request.prompt_tokens, *request.tokens],
            "prompt_length": len(request.prompt_tokens),
        }
    return row


def _is_json(value: Any) -> bool:
    with suppress(TypeError, ValueError, RecursionError):
        json.dumps(value, allow_nan=False)
        return True
    return False


def _values_by_id(answer: Any, ids: Sequence[str], client: HttpClient, key: str) -> dict[str, Any]:
    url = client.url
    entries = answer.get("scores") if isinstance(answer, dict) else None
    if isinstance(answer, ScoreError):
        return dict.fromkeys(ids, answer)
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "id" in entry for entry in entries
    ):
        detail = (
            f'{url} returned {client.quote(answer, 60)}, not {{"scores": [{{"id": ...}}, ...]}}'
        )
        return dict.fromkeys(ids, ScoreError("bad_answer", detail))
    if unknown := [entry["id"] for entry in entries if entry["id"] not in ids]:
        detail = f"{url} scored the id {client.quote(unknown[0], 60)}, which was not in the request"
        return dict.fromkeys(ids, ScoreError("unknown_id", detail))
    values: dict[str, Any] = {}
    for entry in entries:
        name = entry["id"]
        if name in values:
            values[name] = ScoreError("duplicate_id", f"{url} scored id {name} more than once")
        elif "error" in entry:
            values[name] = ScoreError(
                "error", f"{url} reported an error: {client.quote(entry['error'])}"
            )
        else:
            values[name] = entry.get(key)
    return {
        name: values.get(name, ScoreError("missing_id", f"{url} returned no score for id {name}"))
        for name in ids
    }


def finite_number(value: Any, source: str) -> float:
    """Returns `value` as a float. Raises ScoreError unless it is a finite number, not a boolean or text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScoreError(
            "not_a_number", f"{source} returned a {type(value).__name__} as a score, not a number"
        )
    with suppress(OverflowError):  # an integer too large for a float
        if math.isfinite(value):
            return float(value)
    raise ScoreError("nan", f"{source} returned the score {str(value)[:20]}")


class RemoteOptions(HttpOptions):
    batch_size: PositiveInt = 32  # samples in a request
    tokens: bool = (
        False  # send prompt and response as token ids too, for a server with the policy's tokenizer
    )


def make_remote(reward: Reward) -> BatchReward:
    """Raises ValueError if the URL or an option is wrong, or the variable of a header is not set."""
    options = parse_options(RemoteOptions, reward)
    client = HttpClient.of(reward.name, options, reward=reward.name)

    def score(requests: Sequence[ScoreRequest]) -> list[Score]:
        rows = [request_row(request, tokens=options.tokens) for request in requests]
        values = score_batches(client, rows, options.batch_size, key="score")
        return [
            try_score(lambda value: Score(finite_number(value, client.url)), value)
            for value in values
        ]

    return BatchReward(reward.name, reward.weight, score, client.total_s)


def _check_url(url: str, reward: str) -> None:
    """Errors show no part of the URL that may be a password."""
    shown = re.sub(r"(?<=//).*@|(?<=\?).*", "***", url, flags=re.DOTALL)
    name = repr(shown if reward == url else reward)
    try:
        parts = urlsplit(url)
        valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        valid, parts = False, urlsplit("")
    if not valid or not url.isprintable() or " " in url:
        raise ValueError(
            f"rewards: name={name}: {shown!r} is not the URL of a server; write http://host:port/path"
        )
    fields = [
        field for field, _ in parse_qsl(parts.query, keep_blank_values=True) if SECRET.search(field)
    ]
    if parts.username is not None or fields:
        what = f"the field {fields[0]!r}" if fields else "a password"
        raise ValueError(
            f"rewards: name={name}: the URL has {what}, which logs would show; use headers_env"
        )


@cache
def _certificates(file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl.SSLError is one
        problem = f"SSL_CERT_FILE={file!r} has no certificates ({error})"
        raise ValueError(f"rewards: {problem}; correct or unset it") from None
