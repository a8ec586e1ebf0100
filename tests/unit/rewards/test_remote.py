"""Rewards from a real HTTP server: order, retries, identity; and a server that fails in every way it can."""

from __future__ import annotations

import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megarl.config.schema import Reward
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.remote import MAX_BYTES, make_remote

QUICK = {"timeout_s": 10.0, "total_s": 20.0, "backoff_s": 0.01}


def remote(url: str, **options):
    return make_remote(Reward(name=url, options=QUICK | options))


def answer_to(body, score=lambda sample: float(sample["id"].split("/")[0])):
    return {"scores": [{"id": sample["id"], "score": score(sample)} for sample in body["samples"]]}


def test_the_example_server():
    command = [sys.executable, str(Path(__file__).parents[3] / "scripts/reward_server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            port = server.stdout.readline().strip()
            ask = remote(f"http://127.0.0.1:{port}/score")
            scores = ask([ScoreRequest("3/0", "1 + 1 =", " 2", "2"), ScoreRequest("3/1", "1 + 1 =", "3", "2")])
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
    sample = {"id": "5/1", "prompt": "p\ud800", "response": "r\x00", "answer": None, "finish": "length"}
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
BAD = {  # what is answered to samples 0/0 and 1/0: the cause of each
    "wrong length, too short": ({"scores": [ONE]}, ["", "missing_id"]),
    "wrong length, empty": ({"scores": []}, ["missing_id", "missing_id"]),
    "twice": ({"scores": [ONE, ONE, TWO]}, ["duplicate_id", ""]),
    "wrong ids": ({"scores": [ONE, {"id": "7/0", "score": 1.0}]}, ["unknown_id", "unknown_id"]),
    "an extra id": ({"scores": [ONE, TWO, {"id": "7/0", "score": 1.0}]}, ["unknown_id", "unknown_id"]),
    "ids that are numbers": ({"scores": [{"id": 0, "score": 1.0}, TWO]}, ["unknown_id", "unknown_id"]),
    "ids that are lists": ({"scores": [{"id": [], "score": 1.0}, TWO]}, ["unknown_id", "unknown_id"]),
    "text": ({"scores": [ONE | {"score": "1.0"}, TWO]}, ["not_a_number", ""]),
    "a boolean": ({"scores": [ONE | {"score": True}, TWO]}, ["not_a_number", ""]),
    "null": ({"scores": [ONE | {"score": None}, TWO]}, ["not_a_number", ""]),
    "no score": ({"scores": [{"id": "0/0"}, TWO]}, ["not_a_number", ""]),
    "NaN": (b'{"scores": [{"id": "0/0", "score": NaN}, {"id": "1/0", "score": 2}]}', ["nan", ""]),
    "inf": (b'{"scores": [{"id": "0/0", "score": -Infinity}, {"id": "1/0", "score": 2}]}', ["nan", ""]),
    "too large a number": ({"scores": [ONE | {"score": 10**400}, TWO]}, ["nan", ""]),
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
def test_a_bad_answer_is_counted_under_its_own_name_and_not_asked_again(served, answering, cases, what):
    answer, causes = BAD[what]
    scores = remote(served.on(lambda handler, body: answering(handler, answer)))(cases(2))
    assert [score.cause for score in scores] == causes
    assert all((score.value is None) == bool(cause) for score, cause in zip(scores, causes, strict=True))
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
