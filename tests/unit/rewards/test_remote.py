"""Rewards from a real HTTP server: order, retries, identity; and a server that fails in every way it can."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from megarl.config.schema import Reward
from megarl.rewards.catalog import make_rewards
from megarl.rewards.interface import Score, ScoreRequest
from megarl.rewards.remote import MAX_BYTES, make_remote

QUICK = {"timeout_s": 10.0, "total_s": 20.0, "backoff_s": 0.01}


def remote(url: str, **options):
    return make_remote(Reward(name=url, options=QUICK | options))


def answer_to(body, score=lambda sample: float(sample["id"].split("/")[0])):
    return {"scores": [{"id": sample["id"], "score": score(sample)} for sample in body["samples"]]}


def test_the_example_server():
    command = [sys.executable, str(Path(__file__).parents[3] / "scripts/reward_server.py"), "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            port = server.stdout.readline().strip()
            ask = remote(f"http://127.0.0.1:{port}/score")
            scores = ask(
                [
                    ScoreRequest("3/0", "1 + 1 =", " 2", "2"),
                    ScoreRequest("3/1", "1 + 1 =", "3", "2"),
                ]
            )
        finally:
            server.kill()
    assert [score.value for score in scores] == [1.0, 0.0]


def test_order_is_by_id_and_requests_overlap(served, answering, cases):
    now, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3, timeout=8)

    def backwards(handler, body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()  # of six requests, three and three are here at once
        with lock:
            now -= 1
        answer = answer_to(body)
        answering(handler, {"scores": answer["scores"][::-1]})

    url = served.on(backwards)
    scores = remote(url, batch_size=2, concurrency=3)(cases(11))
    assert [score.value for score in scores] == list(map(float, range(11)))
    assert most == 3
    assert sorted(len(body["samples"]) for _, _, body in served.seen) == [1, 2, 2, 2, 2, 2]
    keys = {headers["Idempotency-Key"] for _, headers, _ in served.seen}
    assert len(keys) == 6


def test_what_is_sent(served, answering, monkeypatch):
    monkeypatch.setenv("REWARD_AUTH", "Bearer 1234")
    url = served.on(lambda handler, body: answering(handler, answer_to(body)))
    ask = remote(url, headers_env={"Authorization": "REWARD_AUTH"})
    extra = {"level": 3, "score": print, "bad": math.nan, "tests": ["assert 1"]}
    ask([ScoreRequest("5/1", "p\ud800", "r\x00", None, (1, 2), "length", extra)])
    _, headers, body = served.seen[0]
    sample = {
        "id": "5/1",
        "prompt": "p\ud800",
        "response": "r\x00",
        "answer": None,
        "finish": "length",
    }
    assert body == {"samples": [sample | {"extra": {"level": 3, "tests": ["assert 1"]}}]}
    assert headers["Authorization"] == "Bearer 1234"
    assert "1234" not in repr(ask)


@pytest.mark.parametrize("failure", [500, 503, 429, "close"])
def test_a_request_is_sent_again_under_the_same_key(served, answering, cases, failure):
    def twice_bad(handler, body):
        if len(served.seen) > 2:
            answering(handler, answer_to(body))
        elif failure == "close":
            handler.close_connection = True
        else:
            answering(handler, b"", status=failure, Retry_After="0.01")

    scores = remote(served.on(twice_bad))(cases(3))
    assert [score.value for score in scores] == [0.0, 1.0, 2.0]
    assert len(served.seen) == 3
    assert len({headers["Idempotency-Key"] for _, headers, _ in served.seen}) == 1


def test_retry_after_is_obeyed(served, answering, cases):
    def busy_once(handler, body):
        times.append(time.monotonic())
        if len(times) > 1:
            answering(handler, answer_to(body))
        else:
            answering(handler, b"", status=429, Retry_After="0.5")

    times: list[float] = []
    assert remote(served.on(busy_once))(cases(1))[0].value == 0.0
    assert times[1] - times[0] >= 0.5


def test_no_server_at_all(cases):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/score"
        scores = remote(url, retries=2)(cases(2))
    assert [(score.value, score.cause) for score in scores] == [(None, "no_connection")] * 2
    assert "3 attempts" in scores[0].detail


ONE = {"id": "0/0", "score": 1.0}
TWO = {"id": "1/0", "score": 2.0}
DEEP: list = []
for _ in range(500):
    DEEP = [DEEP]
BAD = {  # what is answered to samples 0/0 and 1/0: the cause of each
    "wrong length, too short": ({"scores": [ONE]}, ["", "missing_id"]),
    "wrong length, empty": ({"scores": []}, ["missing_id", "missing_id"]),
    "twice": ({"scores": [ONE, ONE, TWO]}, ["duplicate_id", ""]),
    "wrong ids": ({"scores": [ONE, {"id": "7/0", "score": 1.0}]}, ["unknown_id", "unknown_id"]),
    "an extra id": (
        {"scores": [ONE, TWO, {"id": "7/0", "score": 1.0}]},
        ["unknown_id", "unknown_id"],
    ),
    "ids that are numbers": (
        {"scores": [{"id": 0, "score": 1.0}, TWO]},
        ["unknown_id", "unknown_id"],
    ),
    "ids that are lists": (
        {"scores": [{"id": [], "score": 1.0}, TWO]},
        ["unknown_id", "unknown_id"],
    ),
    "text": ({"scores": [ONE | {"score": "1.0"}, TWO]}, ["not_a_number", ""]),
    "a boolean": ({"scores": [ONE | {"score": True}, TWO]}, ["not_a_number", ""]),
    "null": ({"scores": [ONE | {"score": None}, TWO]}, ["not_a_number", ""]),
    "no score": ({"scores": [{"id": "0/0"}, TWO]}, ["not_a_number", ""]),
    "NaN": (b'{"scores": [{"id": "0/0", "score": NaN}, {"id": "1/0", "score": 2}]}', ["nan", ""]),
    "inf": (
        b'{"scores": [{"id": "0/0", "score": -Infinity}, {"id": "1/0", "score": 2}]}',
        ["nan", ""],
    ),
    "too large a number": ({"scores": [ONE | {"score": 10**400}, TWO]}, ["nan", ""]),
    "too large a float": (
        b'{"scores": [{"id": "0/0", "score": 1e400}, {"id": "1/0", "score": 2}]}',
        ["nan", ""],
    ),
    "too many digits": (
        b'{"scores": [{"id": "0/0", "score": ' + b"1" * 5000 + b"}]}",
        ["not_json"] * 2,
    ),
    "a list as a score": ({"scores": [ONE | {"score": [1]}, TWO]}, ["not_a_number", ""]),
    "a deep score": (
        b'{"scores": [{"id": "0/0", "score": ' + b"[" * 100_000 + b"}]}",
        ["not_json"] * 2,
    ),
    "a deep id": ({"scores": [{"id": DEEP, "score": 1.0}, TWO]}, ["unknown_id", "unknown_id"]),
    "an error and a score": ({"scores": [ONE | {"error": "x"}, TWO]}, ["error", ""]),
    "a gzip bomb": (gzip.compress(b" " * 10_000_000), ["not_json"] * 2),
    "an error": ({"scores": [{"id": "0/0", "error": "no GPU"}, TWO]}, ["error", ""]),
    "a list": ([1.0, 2.0], ["bad_answer"] * 2),
    "plain scores": ({"scores": [1.0, 2.0]}, ["bad_answer"] * 2),
    "another object": ({"rewards": []}, ["bad_answer"] * 2),
    "no JSON": (b"<html>sorry</html>", ["not_json"] * 2),
    "no text": (b"\xff\xfe\x00", ["not_json"] * 2),
    "brackets": (b"[" * 200_000, ["not_json"] * 2),
    "nothing": (b"", ["not_json"] * 2),
    "10 MB": (b" " * 10_000_000, ["too_large"] * 2),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_answer_is_counted_under_its_own_name_and_not_asked_again(
    served, answering, cases, what
):
    answer, causes = BAD[what]
    scores = remote(served.on(lambda handler, body: answering(handler, answer)))(cases(2))
    assert [score.cause for score in scores] == causes
    assert all(
        (score.value is None) == bool(cause) for score, cause in zip(scores, causes, strict=True)
    )
    assert all(score.detail for score in scores if score.cause)
    assert len(served.seen) == 1


def hangs(handler, served, dripping):
    served.over.wait(120)


def drips_headers(handler, served, dripping):
    dripping(handler, b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100, served.over)


def drips_body(handler, served, dripping):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    dripping(handler, b" " * 1000, served.over)


def closes_mid_answer(handler, served, dripping):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"scores": [')
    handler.close_connection = True


def resets(handler, served, dripping):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(handler.connection.detach())
    handler.close_connection = True


def no_http(handler, served, dripping):
    handler.wfile.write(b"220 mail.example ESMTP\r\n")
    handler.close_connection = True


def endless(handler, served, dripping):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(MAX_BYTES // 10_000 + 1000):
        handler.wfile.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")


def large_header(handler, served, dripping):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 5_000_000 + b"\r\n\r\n{}")
    handler.close_connection = True


def more_than_announced(handler, served, dripping):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{"scores": []}')
    handler.close_connection = True


def continues(handler, served, dripping):
    while not served.over.wait(0.001):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    ("behaviour", "cause", "attempts"),
    [
        (hangs, "timeout", 1),
        (drips_headers, "timeout", 1),
        (drips_body, "timeout", 1),
        (closes_mid_answer, "broken", 3),
        (resets, "broken", 3),
        (no_http, "broken", 3),
        (endless, "too_large", 1),
        (large_header, "broken", 3),
        (more_than_announced, "not_json", 1),
        (continues, "timeout", 1),
        (401, "http_401", 1),
        (404, "http_404", 1),
        (302, "http_302", 1),
        (500, "http_500", 3),
        (429, "http_429", 3),
    ],
)
def test_a_server_that_misbehaves(served, answering, dripping, cases, behaviour, cause, attempts):
    def answer(handler, body):
        if callable(behaviour):
            behaviour(handler, served, dripping)
        else:
            answering(handler, b"", status=behaviour, Location="/", Retry_After="nonsense")

    start = time.monotonic()
    patience = 0.4 if cause == "timeout" else 10.0
    scores = remote(served.on(answer), retries=2, timeout_s=patience)(cases(2))
    assert time.monotonic() - start < 60
    assert [(score.value, score.cause) for score in scores] == [(None, cause)] * 2
    assert ("timeout_s=0.4" in scores[0].detail) == (cause == "timeout")
    assert len(served.seen) == attempts


def test_all_requests_together_are_bounded_too(served, cases):
    """150 requests of 0.4 s each, one at a time, given 0.9 s; the answers there are count."""
    url = served.on(lambda handler, body: served.over.wait(120))
    start = time.monotonic()
    scores = remote(url, batch_size=1, concurrency=1, timeout_s=0.4, total_s=0.9)(cases(150))
    assert time.monotonic() - start < 30
    assert {score.cause for score in scores} == {"timeout"}
    assert "total_s" in scores[-1].detail


def test_one_bad_batch_among_good_ones(served, answering, cases):
    def first_fails(handler, body):
        if body["samples"][0]["id"] == "0/0":
            answering(handler, b"", status=400)
        else:
            answering(handler, answer_to(body))

    scores = remote(served.on(first_fails), batch_size=2)(cases(4))
    assert [score.value for score in scores] == [None, None, 2.0, 3.0]


def test_numbers_that_are_scores(served, answering, cases):
    """The last of two fields of one name counts, as JSON has it; -0.0 and 1e308 are numbers."""
    answer = (
        b'{"scores": [{"id": "0/0", "score": 9, "score": -0.0}, {"id": "1/0", "score": 1e308}]}'
    )
    scores = remote(served.on(lambda handler, body: answering(handler, answer)))(cases(2))
    assert [score.value for score in scores] == [0.0, 1e308]


TOKEN = "Bearer canary-5f3c"
OPTIONS = QUICK | {"retries": 0, "headers_env": {"Authorization": "SCORER_AUTH"}}


@pytest.fixture(params=["remote", "judge", "process"])
def asking(request, monkeypatch):
    """Scores one sample with a reward that asks a URL, and sends a secret."""
    monkeypatch.setenv("SCORER_AUTH", TOKEN)

    def ask(url: str) -> Score:
        options = {
            "remote": OPTIONS,
            "judge": OPTIONS | {"url": url, "model": "m"},
            "process": OPTIONS | {"scorer": url, "splitter": "newline"},
        }[request.param]
        name = url if request.param == "remote" else request.param
        [reward] = make_rewards([Reward(name=name, options=options)], decode=lambda tokens: "r")
        return reward([ScoreRequest("0/0", "p", "r", "a", (1,))])[0]

    return ask


def grades(handler, body, answering):
    """The answer that each of the three rewards takes for 1.0."""
    if "messages" in body:
        mark = re.findall(r"VERDICT-[0-9a-f]{8}", body["messages"][0]["content"])[-1]
        answering(handler, {"choices": [{"message": {"content": mark + ': {"score": 1}'}}]})
    else:
        answering(handler, {"scores": [{"id": "0/0", "score": 1.0, "steps": [1.0]}]})


def serving_all(server, answering):
    answer = partial(grades, answering=answering)
    server.answers = defaultdict(lambda: answer)  # whatever the path
    return server.base + "/v1"


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "Https", "hTTPs"])
def test_certificates_are_always_verified(
    impostor, answering, asking, monkeypatch, certificate, scheme
):
    url = scheme + serving_all(impostor, answering).removeprefix("https")
    score = asking(url)
    assert (score.value, score.cause) == (None, "no_connection")
    assert "CERTIFICATE_VERIFY_FAILED" in score.detail
    assert not impostor.seen, "the impostor got the token"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asking(url).value == 1.0
    assert impostor.seen[0][1]["Authorization"] == TOKEN


def test_a_file_without_certificates(asking, monkeypatch, tmp_path):
    (tmp_path / "empty.pem").write_text("nothing")
    for file in ("empty.pem", "missing.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / file))
        with pytest.raises(
            ValueError,
            match=f"SSL_CERT_FILE='.*{file}' has no certificates .*; correct or unset it",
        ):
            asking("http://host/v1")


def test_proxies_in_the_environment_are_not_used(served, other, answering, asking, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, serving_all(other, answering))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert asking(serving_all(served, answering)).value == 1.0
    assert len(served.seen) == 1 and not other.seen


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", ["other", "file:///etc/passwd", "/elsewhere"])
def test_redirects_are_not_followed(served, other, answering, monkeypatch, status, place):
    monkeypatch.setenv("SCORER_AUTH", TOKEN)
    place = serving_all(other, answering) if place == "other" else place
    url = served.on(lambda handler, body: answering(handler, b"", status=status, Location=place))
    [score] = make_remote(Reward(name=url, options=OPTIONS))([ScoreRequest("0/0", "p", "r")])
    assert (score.value, score.cause) == (None, f"http_{status}")
    assert len(served.seen) == 1 and not other.seen


@pytest.mark.parametrize(
    "wait", ["1e9", "nan", "-1", "Fri, 31 Dec 9999 23:59:59 GMT", "", "0x", "inf"]
)
def test_a_server_cannot_make_a_run_wait_longer_than_its_limits(served, answering, cases, wait):
    url = served.on(lambda handler, body: answering(handler, b"", status=429, Retry_After=wait))
    start = time.monotonic()
    assert {score.cause for score in remote(url, retries=1, total_s=0.3)(cases(2))} <= {
        "timeout",
        "http_429",
    }
    assert time.monotonic() - start < 60, "the header asks for hours"


def test_a_server_that_is_gone_is_told_from_a_slow_one_when_time_is_up(cases):
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/score"
        scores = remote(url, retries=10_000, backoff_s=0.01, total_s=0.5, concurrency=1)(cases(3))
    assert {score.cause for score in scores} == {"no_connection"}
    assert all(
        "cannot be reached" in score.detail and "total_s=0.5" in score.detail for score in scores
    )


URLS = """ftp://host/s file:///etc/passwd gopher://host/s http:///s http://host:99999/s http://host:0/s http://host:x/s
http://me:canary@host/s http://me@host/s http://:canary@host/s http://me:canary@host:x/s http://me:can/ary@host/s
http://host/s?api_key=canary http://host/s?a=1&TOKEN=canary http://host/s?client-secret=canary
HTTP://me:canary@host/s""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "url", [*URLS, *(f"http://ho{c}st/s{c}" for c in "\n\t\r \x1b\x00\u2028\xa0"), "http://h/s\n"]
)
def test_urls_that_are_refused(asking, url):
    with pytest.raises(ValueError, match=r"write http://host:port/path|use headers_env") as refused:
        asking(url)
    assert str(refused.value).isprintable()
    assert not any(part in str(refused.value) for part in ("canary", "can/", "ary@"))


@pytest.mark.parametrize(
    "value",
    ["a\r\nX-Evil: 1", "canary\n", "\ncanary", "canaryé", "canary\u2028", " canary", "a\x7f"],
)
def test_header_values_that_are_refused(asking, monkeypatch, value):
    monkeypatch.setenv("SCORER_AUTH", value)
    with pytest.raises(
        ValueError, match="SCORER_AUTH has characters that no HTTP header may hold"
    ) as refused:
        asking("http://host/v1")
    assert value.strip() not in str(refused.value)


@pytest.mark.parametrize("value", [TOKEN, "canary-5f3c", "sk-canary", ""])
def test_a_secret_in_place_of_its_variable_is_not_shown(value):
    with pytest.raises(
        ValueError, match="is not the name of an environment variable in capitals"
    ) as refused:
        remote("http://host/s", headers_env={"Authorization": value})
    assert "canary" not in str(refused.value)


ECHOES = {  # what a server may do with the secret that it was sent, here X, and with a terminal's control characters
    "error": {"scores": [{"id": "0/0", "error": "X\n\x1b[31m"}]},
    "id": {"scores": [{"id": "X\n\x1b[31m", "score": 1}]},
    "score": {"scores": [{"id": "0/0", "score": "X\n\x1b[31m", "steps": ["X\n\x1b[31m"]}]},
    "steps": {"scores": [{"id": "0/0", "steps": "X\n\x1b[31m"}]},
    "another object": {"X\n\x1b[31m": 1},
    "no JSON": b"\x1b[31mX\n\xff",
    "a judge's text": {"choices": [{"message": {"content": "X\n\x1b[31m"}}]},
}


@pytest.mark.parametrize("name", ECHOES)
@pytest.mark.parametrize("secret", [TOKEN, TOKEN.split()[1]])
def test_logs_show_a_servers_text_escaped_and_without_secrets(
    served, answering, asking, name, secret
):
    def echo(handler, body):
        data = (
            ECHOES[name] if isinstance(ECHOES[name], bytes) else json.dumps(ECHOES[name]).encode()
        )
        answering(handler, data.replace(b"X", secret.encode()))

    served.answers = defaultdict(lambda: echo)
    score = asking(served.base + "/v1")
    assert score.value is None and score.detail
    assert score.detail.isprintable()
    assert "canary" not in score.detail
