"""Rewards from a server, in batches over HTTP. `scripts/reward_server.py` is a complete server.

    rewards: [{name: "http://host:8000/score", weight: 1.0,
               options: {timeout_s: 30, retries: 3, batch_size: 32}}]

    POST /score HTTP/1.1
    Content-Type: application/json
    Idempotency-Key: 5b0c...           the same for all attempts of one request

    {"samples": [{"id": "17/0", "prompt": "1 + 1 =", "response": "2", "answer": "2",
                  "finish": "stop", "extra": {}}]}

    HTTP/1.1 200 OK
    {"scores": [{"id": "17/0", "score": 1.0}]}

The answer has one entry per sample, in any order. `score` is a finite number; the entry of a sample
that the server cannot score is {"id": ..., "error": "reason"}. For process rewards a sample has
`steps`, a list of texts, and its entry has `steps`, a list of as many numbers. `extra` has the
problem's other fields, except those that JSON cannot represent. A sample has `opening`, a tag such
as <think>, if its prompt opens thoughts. With the option `tokens: true`, a sample also has
`tokens`, the ids of prompt and response, which `megarl serve-reward` then scores; the first
`prompt_length` of them are the prompt's.

Certificates of https servers are always verified, against SSL_CERT_FILE or else certifi; proxies in
the environment are not used. Put secrets into environment variables and name them in `headers_env`:
URLs with a secret are refused, and secrets are removed from a server's text before it is logged.

Failed or broken connections and the statuses 5xx and 429 (after its Retry-After) are retried after
random pauses of increasing length; requests that exceed `timeout_s`, other statuses and malformed
answers are not. A sample without a score is dropped and counted as reward/<url>/<cause>. Causes for
a whole request: no_connection, broken, timeout, http_<status>, too_large, not_json, bad_answer,
unknown_id (an id that was not sent casts doubt on the others); for one sample: missing_id,
duplicate_id, not_a_number, nan, error.
"""

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from random import SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import certifi
from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.config.section import not_misread
from megarl.jail.workers import CallError
from megarl.platform.env import SECRET, SECRET_NAMES, get_env, redact
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

Read = Callable[[int, Any], Any]  # (index of the request, its JSON answer) -> result
MAX_BYTES = 4 << 20  # size limit of an answer
CONNECT_S = 10.0
MAX_PAUSE_S = 60.0
CANCEL_S = 10.0  # time to cancel requests after total_s


class _Retryable(CallError):
    """Raised for a failure that another attempt, at least `pause_s` from now, may not have."""

    pause_s = 0.0


class HttpOptions(BaseModel):
    """Options shared by all rewards that send HTTP requests."""

    model_config = Section.model_config
    _not_misread = not_misread

    timeout_s: PositiveFloat = 30.0  # for one attempt, from connecting to the answer's last byte
    total_s: PositiveFloat = 300.0  # for all requests of a step together, including pauses
    retries: NonNegativeInt = 3
    backoff_s: PositiveFloat = 0.5  # mean of the first pause; the mean doubles each time
    concurrency: PositiveInt = 16  # requests in flight
    # {header: environment variable with the secret}
    headers_env: dict[str, str] = {}


class HttpClient:
    """Sends JSON to a server, with retries.

    The constructor raises ValueError, naming `setting` and its value `name`, if the URL or a header
    is wrong. `ask` may be called from any thread without a running event loop.
    """

    def __init__(
        self,
        url: str,
        options: HttpOptions,
        *,
        name: str,
        setting: str = "rewards: name",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        _check_url(url, setting, name)
        where = f"{setting}={name!r}"
        self.url = url
        self.options = options
        self.max_bytes = max_bytes
        self.total_s = options.total_s + CANCEL_S
        self.headers = {}  # may hold secrets
        for header, variable in options.headers_env.items():
            # the value may be the secret itself, so the error does not show it
            if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable):
                raise ValueError(
                    f"{where}: headers_env[{header!r}] is not the name of an environment variable "
                    "in capitals, such as SCORER_AUTH; export the value, and write the variable's "
                    "name"
                )
            value = get_env(variable)
            if not value:
                raise ValueError(
                    f"{where}: headers_env names {variable}, which is not set; export it"
                )
            if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", value):
                raise ValueError(
                    f"{where}: {variable} has characters that no HTTP header may hold; "
                    "export it again"
                )
            SECRET_NAMES.add(variable)
            self.headers[header] = value
        self.certificates = _certificates(get_env("SSL_CERT_FILE") or certifi.where())

    def quote(self, value: Any, most: int = 200) -> str:
        """Returns up to `most` characters of a server's text on one line, with secrets removed."""
        return repr(redact(str(value))[:most])

    def ask(self, payloads: Sequence[Any], read: Read = lambda index, answer: answer) -> list[Any]:
        """Sends the payloads and returns ``read(index, answer)`` for each, in order, or a
        ScoreError for a request that failed.
        """
        if not payloads:
            return []
        return asyncio.run(self._all(payloads, read))

    async def _all(self, payloads: Sequence[Any], read: Read) -> list[Any]:
        import httpx  # deferred: checking a config does not need it

        options = self.options
        slots = asyncio.Semaphore(options.concurrency)
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(CONNECT_S, options.timeout_s)),
            limits=httpx.Limits(max_connections=options.concurrency),
            headers=self.headers,
            verify=self.certificates,
            trust_env=False,
        )
        # the failure of the most recent attempt; empty if it succeeded
        failed = []

        async def one(index: int, payload: Any) -> Any:
            async with slots:
                try:
                    answer = await self._with_retries(client, failed, json.dumps(payload).encode())
                    return read(index, answer)
                except ScoreError as error:
                    return error
                except Exception as error:  # noqa: BLE001 (httpx may raise; the run goes on)
                    return ScoreError(
                        "error", f"{self.url}: {type(error).__name__}: {self.quote(error)}"
                    )

        async with client:
            tasks = [asyncio.create_task(one(*job)) for job in enumerate(payloads)]
            _, late = await asyncio.wait(tasks, timeout=options.total_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        out_of_time = ScoreError(
            "timeout", f"{self.url} did not answer all requests within total_s={options.total_s}"
        )
        if failed and failed[0].cause in UNREACHABLE:
            out_of_time = ScoreError(
                failed[0].cause, f"{failed[0]} after retries for total_s={options.total_s}"
            )
        return [out_of_time if task in late else task.result() for task in tasks]

    async def _with_retries(
        self, client: "httpx.AsyncClient", failed: list[_Retryable], body: bytes
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
        self, client: "httpx.AsyncClient", body: bytes, headers: Mapping[str, str]
    ) -> Any:
        import httpx

        data = bytearray()
        try:
            async with client.stream("POST", self.url, content=body, headers=headers) as response:
                status = response.status_code
                cause = f"http_{status}"
                detail = f"{self.url} returned HTTP {status}"
                if status == 429 or status >= 500:
                    failure = _Retryable(cause, detail)
                    failure.pause_s = _retry_after(response.headers.get("Retry-After", ""))
                    raise failure
                if status != 200:
                    raise ScoreError(cause, detail)
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > self.max_bytes:
                        raise ScoreError(
                            "too_large", f"{self.url} returned more than {self.max_bytes} bytes"
                        )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Retryable(
                "no_connection", f"{self.url} cannot be reached ({self.quote(error)})"
            ) from None
        except httpx.TransportError as error:
            raise _Retryable(
                "broken", f"the connection to {self.url} failed ({type(error).__name__})"
            ) from None
        try:
            return json.loads(data)
        # UnicodeDecodeError and JSONDecodeError are ValueErrors
        except (ValueError, RecursionError):
            raise ScoreError(
                "not_json",
                f"{self.url} returned {self.quote(data.decode(errors='replace'), 60)}, "
                "which is not JSON",
            ) from None


def _retry_after(header: str) -> float:
    """Returns the seconds to wait by a Retry-After header, a number or a date; 0 if it is neither.

    The result may be negative or infinite.
    """
    for parse in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with suppress(ValueError, TypeError, OverflowError):
            return parse(header)
    return 0.0


def score_batches(
    client: HttpClient,
    rows: Sequence[Mapping[str, Any]],
    batch_size: int,
    *,
    key: str,
) -> list[Any]:
    """Sends rows in batches; returns the server's value of `key` for each row, or a ScoreError."""
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    answers = client.ask([{"samples": batch} for batch in batches])
    values = {}
    for batch, answer in zip(batches, answers, strict=True):
        ids = [row["id"] for row in batch]
        try:
            values |= _values_by_id(answer, ids, client, key)
        except ScoreError as error:
            values |= dict.fromkeys(ids, error)
    return [values[row["id"]] for row in rows]


def request_row(request: ScoreRequest, *, tokens: bool = False) -> dict[str, Any]:
    """Returns a request as a JSON object.

    The problem's fields that JSON cannot represent are left out.
    """
    row = {
        "id": request.id,
        "prompt": request.prompt,
        "response": request.response,
        "answer": request.answer,
        "finish": request.finish,
        "extra": {str(key): value for key, value in request.extra.items() if _is_json(value)},
    }
    if request.opening:
        row["opening"] = request.opening
    if tokens:
        row["tokens"] = [*request.prompt_tokens, *request.tokens]
        row["prompt_length"] = len(request.prompt_tokens)
    return row


def _is_json(value: Any) -> bool:
    with suppress(TypeError, ValueError, RecursionError):
        json.dumps(value, allow_nan=False)
        return True
    return False


def _values_by_id(answer: Any, ids: Sequence[str], client: HttpClient, key: str) -> dict[str, Any]:
    """Returns {id: value or ScoreError}. Raises ScoreError if the whole request has failed."""
    if isinstance(answer, ScoreError):
        raise answer
    url = client.url
    entries = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "id" in entry for entry in entries
    ):
        raise ScoreError(
            "bad_answer",
            f'{url} returned {client.quote(answer, 60)}, not {{"scores": [{{"id": ...}}, ...]}}',
        )
    values = {}
    for entry in entries:
        name = entry["id"]
        if name not in ids:
            raise ScoreError(
                "unknown_id",
                f"{url} scored the id {client.quote(name, 60)}, which was not in the request",
            )
        if name in values:
            values[name] = ScoreError("duplicate_id", f"{url} scored id {name} more than once")
        elif "error" in entry:
            values[name] = ScoreError(
                "error", f"{url} reported an error: {client.quote(entry['error'])}"
            )
        else:
            values[name] = entry.get(key)
    for name in ids:
        values.setdefault(name, ScoreError("missing_id", f"{url} returned no score for id {name}"))
    return values


def finite_number(value: Any, source: str) -> float:
    """Returns `value` as a float. Raises ScoreError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScoreError(
            "not_a_number",
            f"{source} returned a {type(value).__name__} as a score, not a number",
        )
    with suppress(OverflowError):  # an integer too large for a float
        if math.isfinite(value):
            return float(value)
    raise ScoreError("nan", f"{source} returned the score {str(value)[:20]}")


class RemoteOptions(HttpOptions):
    batch_size: PositiveInt = 32  # samples per request
    # also send prompt and response as token ids, for a server with the policy's tokenizer
    tokens: bool = False


def make_remote(reward: Reward) -> BatchReward:
    """Returns the reward of a server.

    Raises ValueError if the URL or an option is wrong, or if the environment variable of a header
    is not set.
    """
    options = parse_options(RemoteOptions, reward)
    client = HttpClient(reward.name, options, name=reward.name)

    def to_score(value: Any) -> Score:
        return Score(finite_number(value, client.url))

    def score(requests: Sequence[ScoreRequest]) -> list[Score]:
        rows = [request_row(request, tokens=options.tokens) for request in requests]
        return [
            try_score(to_score, value)
            for value in score_batches(client, rows, options.batch_size, key="score")
        ]

    return BatchReward(reward.name, reward.weight, score, client.total_s)


def _check_url(url: str, setting: str, name: str) -> None:
    """Raises ValueError if the URL is malformed or has a secret.

    The error hides the parts of the URL that may be a password.
    """
    shown = re.sub(r"(?<=//).*@|(?<=\?).*", "***", url, flags=re.DOTALL)
    where = f"{setting}={(shown if name == url else name)!r}"
    parts = urlsplit("")
    valid = False
    with suppress(ValueError):
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    if not valid or not url.isprintable() or " " in url:
        raise ValueError(
            f"{where}: {shown!r} is not the URL of a server; write http://host:port/path"
        )
    secrets = [
        f"the field {field!r}"
        for field, _ in parse_qsl(parts.query, keep_blank_values=True)
        if SECRET.search(field)
    ]
    if parts.username is not None:
        secrets.append("a password")
    if secrets:
        raise ValueError(
            f"{where}: the URL has {secrets[0]}, which logs would show; use headers_env"
        )


@cache
def _certificates(file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # includes ssl.SSLError
        raise ValueError(
            f"SSL_CERT_FILE={file!r} has no certificates ({error}); correct or unset it"
        ) from None
