"""Rewards from a server: batches over HTTP. `example_server.py` beside this is one, in twenty lines.

    rewards: [{name: "http://host:8000/score", weight: 1.0, options: {timeout_s: 30, retries: 3, batch_size: 32}}]

    POST /score HTTP/1.1
    Content-Type: application/json
    Idempotency-Key: 5b0c...           the same when this very request is sent again, new for every other one

    {"samples": [{"id": "17/0", "prompt": "1 + 1 =", "response": "2", "answer": "2", "finish": "stop", "extra": {}}]}

    HTTP/1.1 200 OK
    {"scores": [{"id": "17/0", "score": 1.0}]}

One entry a sample, in any order: the ids say which is which. `score` is a finite number. A sample the server cannot
judge gets {"id": ..., "error": "why"} instead. For process rewards a sample carries `steps`, a list of texts, and its
entry `steps`, as many numbers. `extra` is what the task says of the problem, as far as JSON can say it.

Sent again, after a growing and random pause: a connection that could not be made or broke, 5xx, 429 (after its
Retry-After). Not sent again: what took longer than `timeout_s`, other statuses, answers that are not as above. A
sample without a score is left out and counted under reward/<url>/<cause>; it is never worth 0. The causes: of a whole
request no_connection, broken, timeout, http_<status>, too_large, not_json, bad_answer, and unknown_id (a server that
invents ids knows none); of one sample missing_id, duplicate_id, not_a_number, nan, error.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from random import SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.schema import Reward, Section
from megarl.platform.env import get_env
from megarl.rewards.outcome import Case, Verdict, options_of

if TYPE_CHECKING:
    import httpx

__all__ = ["Failed", "Http", "Remote", "RemoteOptions", "ask", "check_url", "make_remote", "number", "sample_row"]

MAX_BYTES = 4 << 20  # of an answer
CONNECT_S = 10.0
LONGEST_PAUSE_S = 60.0
GRACE_S = 10.0  # for requests to be cancelled when the time is up


class Failed(Exception):
    """A request without a usable answer."""

    def __init__(self, cause: str, why: str) -> None:
        super().__init__(why)
        self.cause, self.why = cause, why

    @property
    def verdict(self) -> Verdict:
        return Verdict(None, self.cause, self.why)


class _Again(Exception):
    """A failure that another attempt may mend, no sooner than `pause_s` from now."""

    def __init__(self, cause: str, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.cause, self.why, self.pause_s = cause, why, pause_s


@dataclass(frozen=True)
class Http:
    """How one server is asked. `ask` may be called from any thread without an event loop of its own."""

    url: str
    timeout_s: float  # of one attempt, from connecting to the answer's last byte
    total_s: float  # of all requests together, pauses included
    retries: int
    concurrency: int
    backoff_s: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets

    def ask(self, payloads: Sequence[Any]) -> list[Any]:
        """The JSON answers in order; a Failed where there is none."""
        return asyncio.run(self._all(payloads)) if payloads else []

    async def _all(self, payloads: Sequence[Any]) -> list[Any]:
        import httpx  # not before it is used: a config is checked without it

        gate = asyncio.Semaphore(self.concurrency)
        limits = httpx.Limits(max_connections=self.concurrency)
        timeout = httpx.Timeout(None, connect=min(CONNECT_S, self.timeout_s))
        verify = self.url.startswith("https:")  # else certificates would be read for nothing
        client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=dict(self.headers), verify=verify)
        async with client:
            tasks = [asyncio.create_task(self._one(client, gate, payload)) for payload in payloads]
            _, late = await asyncio.wait(tasks, timeout=self.total_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        out_of_time = Failed("timeout", f"{self.url} had not answered all requests after total_s={self.total_s}")
        return [out_of_time if task in late else task.result() for task in tasks]

    async def _one(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, payload: Any) -> Any:
        async with gate:
            try:
                return await self._with_retries(client, json.dumps(payload).encode())
            except Failed as failed:
                return failed
            except Exception as error:  # noqa: BLE001 (whatever a client library may raise: the run goes on)
                return Failed("error", f"{self.url}: {type(error).__name__}: {error}")

    async def _with_retries(self, client: httpx.AsyncClient, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Idempotency-Key": uuid4().hex}
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self._attempt(client, body, headers)
            except TimeoutError:
                raise Failed("timeout", f"{self.url} took longer than timeout_s={self.timeout_s}") from None
            except _Again as again:
                if attempt == self.retries:
                    raise Failed(again.cause, f"{again.why}, {attempt + 1} times") from None
                pause_s = self.backoff_s * 2**attempt * SystemRandom().uniform(0.5, 1.5)
                await asyncio.sleep(min(max(pause_s, again.pause_s), LONGEST_PAUSE_S))
        raise AssertionError

    async def _attempt(self, client: httpx.AsyncClient, body: bytes, headers: Mapping[str, str]) -> Any:
        import httpx

        try:
            async with client.stream("POST", self.url, content=body, headers=headers) as response:
                status = response.status_code
                if status == 429 or status >= 500:
                    pause_s = _retry_after(response.headers.get("Retry-After", ""))
                    raise _Again(f"http_{status}", f"{self.url} answered {status}", pause_s)
                if status != 200:
                    raise Failed(f"http_{status}", f"{self.url} answered {status}")
                return _parsed(await self._bounded(response), self.url)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Again("no_connection", f"{self.url} cannot be reached ({error})") from None
        except httpx.TransportError as error:
            raise _Again("broken", f"{self.url} broke the connection off ({type(error).__name__})") from None

    async def _bounded(self, response: httpx.Response) -> bytes:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_BYTES:
                raise Failed("too_large", f"{self.url} answered more than {MAX_BYTES} bytes")
        return bytes(data)


def _retry_after(text: str) -> float:
    """Seconds from a Retry-After header, which is a number of them or a date; 0 for anything else."""
    try:
        pause_s = float(text)
    except ValueError:
        try:
            pause_s = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return pause_s if math.isfinite(pause_s) and pause_s > 0 else 0.0


def _parsed(data: bytes, url: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # of UnicodeDecodeError and JSONDecodeError both
        raise Failed("not_json", f"{url} answered {data[:60]!r}, which is not JSON") from None


# --- scores of a batch --------------------------------------------------------------------------------------------


def sample_row(case: Case) -> dict[str, Any]:
    """What is sent of a sample."""
    extra = {str(key): value for key, value in case.extra.items() if _is_json(value)}
    fields = ("id", "prompt", "response", "answer", "finish")
    return {**{name: getattr(case, name) for name in fields}, "extra": extra}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def ask(http: Http, rows: Sequence[Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """By id: the entry of the server's answer, or a Failed. Every row's id is there."""
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    answers = http.ask([{"samples": batch} for batch in batches])
    found: dict[str, Any] = {}
    for batch, answer in zip(batches, answers, strict=True):
        found |= _entries(answer, [row["id"] for row in batch], http.url)
    return found


def _entries(answer: Any, ids: Sequence[str], url: str) -> dict[str, Any]:
    if isinstance(answer, Failed):
        return dict.fromkeys(ids, answer)
    entries = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        shape = 'not {"scores": [{"id": ...}, ...]}'
        return dict.fromkeys(ids, Failed("bad_answer", f"{url} answered {str(answer)[:60]!r}, {shape}"))
    known, given = set(ids), [entry["id"] for entry in entries]
    if unknown := [name for name in given if not isinstance(name, str) or name not in known]:
        return dict.fromkeys(ids, Failed("unknown_id", f"{url} scored {str(unknown[0])[:60]!r}, which it was not sent"))
    found: dict[str, Any] = {name: Failed("missing_id", f"{url} left out id {name}") for name in ids}
    for entry in entries:
        name = entry["id"]
        first = isinstance(found[name], Failed) and found[name].cause == "missing_id"
        found[name] = entry if first else Failed("duplicate_id", f"{url} scored id {name} more than once")
    return found


def number(value: Any, url: str) -> float:
    """A finite float; raises Failed for anything else, true and "1.0" among it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Failed("not_a_number", f"{url} gave the score {str(value)[:60]!r}, not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Failed("nan", f"{url} gave the score {str(value)[:20]}")
    return found


def read_entry(entry: Any, url: str) -> dict[str, Any]:
    if isinstance(entry, Failed):
        raise entry
    if "error" in entry:
        raise Failed("error", f"{url} could not score it: {str(entry['error'])[:200]}")
    return entry


# --- the reward ---------------------------------------------------------------------------------------------------


class RemoteOptions(Section):
    timeout_s: PositiveFloat = 30.0  # of one attempt
    total_s: PositiveFloat = 300.0  # of all samples of a step together
    retries: NonNegativeInt = 3
    backoff_s: PositiveFloat = 0.5  # the first pause, about; each is twice the one before
    concurrency: PositiveInt = 16  # requests at once
    batch_size: PositiveInt = 32  # samples a request
    headers_env: dict[str, str] = Field(
        default_factory=dict
    )  # {header: environment variable that holds its value}, for secrets


def make_remote(reward: Reward) -> Remote:
    """Raises ValueError when the URL or an option is wrong, or a header's variable is not set."""
    options = options_of(RemoteOptions, reward)
    return Remote(http_of(reward.name, reward.name, options), options.batch_size)


def http_of(url: str, name: str, options: Any) -> Http:
    """`options` has the fields of RemoteOptions that Http needs."""
    check_url(url, name)
    headers = {}
    for header, variable in options.headers_env.items():
        value = get_env(variable)
        if not value:
            raise ValueError(f"rewards: name={name!r}: headers_env names {variable}, which is not set; export it")
        headers[header] = value
    return Http(
        url, options.timeout_s, options.total_s, options.retries, options.concurrency, options.backoff_s, headers
    )


def check_url(url: str, name: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        right, parts = False, urlsplit("")
    if not right:
        raise ValueError(f"rewards: name={name!r}: {url!r} is no URL of a server; write http://host:port/path")
    if parts.username or parts.password:
        raise ValueError(f"rewards: name={name!r}: its URL holds a password, which logs would show; use headers_env")


@dataclass(frozen=True)
class Remote:
    """outcome.Part."""

    http: Http
    batch_size: int

    @property
    def total_s(self) -> float:
        return self.http.total_s + GRACE_S

    def __call__(self, cases: Sequence[Case]) -> list[Verdict]:
        found = ask(self.http, [sample_row(case) for case in cases], self.batch_size)
        return [self._verdict(found[case.id]) for case in cases]

    def _verdict(self, entry: Any) -> Verdict:
        try:
            return Verdict(number(read_entry(entry, self.http.url).get("score"), self.http.url))
        except Failed as failed:
            return failed.verdict
