"""`megarl serve-reward` as its users meet it: a process, asked over HTTP by the reward client of a run."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from reward_score_ranks import save_classifier
from transformers import AutoModelForSequenceClassification

from megarl.cli import main
from megarl.commands import reward_server
from megarl.commands.reward_server import SampleToScore, score_rows
from megarl.config.schema import Reward
from megarl.data.tokenizer import TokenIds
from megarl.rewards.interface import ScoreRequest
from megarl.rewards.remote import make_remote
from megarl.types import Sample

COMMAND = [sys.executable, "-m", "megarl.cli", "serve-reward"]
PROMPT = (5, 6, 7)
EOS = 1  # of the classifier, which has no tokenizer: texts are token ids


class Server:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"megarl: .* is served at (.*):(\d+)/score\n", line)
        assert found, line + log.read_text()
        self.process, self.log, self.host, self.port = process, log, found[1], int(found[2])

    def ask(self, body: bytes, **headers: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/score", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def addresses(self) -> set[str]:
        """Those on which any socket of the process listens."""
        sockets = psutil.Process(self.process.pid).net_connections("inet")
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@contextmanager
def serve(folder: Path, *args: str) -> Iterator[Server]:
    log = folder.parent / "stderr"
    command = [*COMMAND, str(folder), "--port", "0", "--dtype", "fp32", *args]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            yield Server(process, log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("served") / "classifier")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as started:
        yield started


def make_requests() -> list[ScoreRequest]:
    """Every second response was cut, and has no end token."""
    generator, requests = torch.Generator().manual_seed(1), []
    for index in range(9):
        ids = torch.randint(2, 67, (2 + 3 * index,), generator=generator).tolist()
        text, finish = " ".join(map(str, ids)), ("stop", "length")[index % 2]
        tokens = (*ids, EOS) if finish == "stop" else tuple(ids)
        prompt = " ".join(map(str, PROMPT))
        requests.append(
            ScoreRequest(f"{index}/0", prompt, text, "2", tokens, finish, prompt_tokens=PROMPT)
        )
    return requests


@pytest.mark.long
@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
def test_a_run_gets_the_scores_of_transformers(
    folder: Path, server: Server, as_tokens: bool
) -> None:
    options = {
        "tokens": as_tokens,
        "batch_size": 2,
        "concurrency": 16,
        "retries": 0,
        "timeout_s": 120,
    }
    reward = make_remote(Reward(name=f"http://localhost:{server.port}/score", options=options))
    scores = [score.value for score in reward(make_requests())]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [torch.tensor([[*PROMPT, *request.tokens]]) for request in make_requests()]
        expected = [float(model(row).logits) for row in rows]
    print(scores, expected)
    assert scores == pytest.approx(expected, rel=0, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def sample(**values: Any) -> bytes:
    row = {"id": "0", "prompt": "5 6", "response": "7", "finish": "stop", **values}
    return json.dumps(
        {"samples": [{key: value for key, value in row.items() if value is not None}]}
    ).encode()


MALFORMED = [
    (b"", "Invalid JSON"),
    (b'{"samples": [', "Invalid JSON"),
    (b"[" * 100_000, "recursion limit exceeded"),
    (b'{"samples": "\xff"}', "Invalid JSON"),
    (b"[]", "should be an object"),
    (b'{"samples": 5}', "samples Input should be a valid array"),
    (sample(prompt=None), "samples.0.prompt Field required"),
    (sample(response=["7"]), "samples.0.response Input should be a valid string"),
    (sample(response="67"), "text must be token ids 0..66"),
    (sample(tokens=[5, 67]), "samples.0: tokens must be one or more of 0..66, not [5, 67]"),
    (sample(tokens=[5, -1]), "samples.0.tokens.1 Input should be greater than or equal to 0"),
    (sample(tokens=[[5]]), "samples.0.tokens.0 Input should be a valid integer"),
    (sample(prompt="", response="", finish="length"), "samples.0: tokens must be one or more"),
    (
        sample(prompt_length=10**30),
        "samples.0: prompt_length=1000000000000000000000000000000 exceeds",
    ),
    (sample(tokens=[10**30]), "samples.0: tokens must be one or more of 0..66"),
]


@pytest.mark.long
def test_a_malformed_request_is_answered_with_the_reason(server: Server) -> None:
    status, right = server.ask(sample())
    assert status == 200 and [set(entry) for entry in right["scores"]] == [{"id", "score"}]
    for body, reason in MALFORMED:
        status, answer = server.ask(body)
        assert status == 400 and reason in answer["error"], (body[:80], answer)
    status, answer = server.ask(b"", **{"Content-Length": "99999999999"})
    assert status == 400 and "Content-Length=99999999999" in answer["error"]
    assert server.ask(b'{"samples": []}') == (200, {"scores": []})
    assert server.ask(sample()) == (200, right), "and goes on as before"


def test_the_response_is_what_follows_the_prompts_tokens() -> None:
    """A policy's prompt may have more tokens than its text, such as a system prompt."""
    seen: list[Sample] = []

    def reward(samples: Sequence[Sample]) -> list[Sample]:
        seen.extend(samples)
        return list(samples)

    row: dict[str, Any] = {"id": "0", "prompt": "5", "response": "7", "finish": "stop"}
    rows = [row, row | {"tokens": [3, 5, 7, 1]}, row | {"tokens": [3, 5, 7, 1], "prompt_length": 2}]
    score_rows(
        cast(Any, reward),
        TokenIds((1,), 67),
        67,
        [SampleToScore.model_validate(row) for row in rows],
    )
    assert [sample.tokens.tolist() for sample in seen] == [[5, 7, 1], [3, 5, 7, 1], [3, 5, 7, 1]]
    assert [int(sample.trainable.sum()) for sample in seen] == [2, 3, 2]


def test_a_prompt_is_no_longer_than_its_tokens() -> None:
    row = {"id": "0", "prompt": "5", "response": "7", "finish": "stop", "prompt_length": 10**30}
    rows = [SampleToScore.model_validate(row)]
    with pytest.raises(ValueError, match=r"samples\.0: prompt_length=10{30} exceeds 3 tokens"):
        score_rows(cast(Any, list), TokenIds((1,), 67), 67, rows)


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> Iterator[int]:
    """The server without a model, on a thread; yields its port. It scores what a response says."""
    monkeypatch.setattr(reward_server, "HEADERS_S", limit_s)
    monkeypatch.setattr(reward_server, "BODY_S", limit_s)
    server = reward_server.make_server(
        lambda rows: [{"id": row.id, "score": float(row.response)} for row in rows]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
        assert not thread.is_alive()


def send(port: int, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(data)
    return client


def ask(port: int, body: bytes, head: bytes = b"POST /score HTTP/1.1\r\nHost: a\r\n") -> bytes:
    with send(port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body) as client:
        return client.makefile("rb").read()


def test_slow_clients_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, limit_s=600.0) as port:
        head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n"
        slow = [send(port, part) for part in (b"", b"POST /sc", head, head + b"\r\n{", b"\0\1")]
        assert b'{"scores":[{"id":"0","score":7.0}]}' in ask(port, sample())
        for client in slow:
            client.close()


def test_slow_clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch, limit_s=0.2) as port:
        head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n"
        for part in (b"", b"POST /sc", head):
            with send(port, part) as client, suppress(ConnectionResetError):
                assert client.recv(1) == b""
        with send(port, head + b"\r\n{") as client:
            assert b"the request did not arrive within 0.2 s" in client.makefile("rb").read()


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (b"-1", b"Invalid HTTP request"),
        (b"x", b"Invalid HTTP request"),
        (b"99999999999", b"Content-Length=99999999999 is not within 0 and 1000"),
        (b"5\r\nContent-Length: 7", b"Invalid HTTP request"),
    ],
)
def test_a_request_of_no_size_or_a_large_one_is_refused(
    length: bytes, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_server, "MAX_BYTES", 1000)
    head = b"POST /score HTTP/1.1\r\nHost: a\r\n"
    with listening(monkeypatch, limit_s=60.0) as port:
        with send(port, head + b"Content-Length: " + length + b"\r\n\r\n") as client:
            answer = client.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 400") and said in answer, answer
        chunks = b"190\r\n" + b"x" * 400 + b"\r\n"  # 400 bytes, of unknown number
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        with send(port, head + 3 * chunks) as client:
            assert b"is not within 0 and 1000" in client.makefile("rb").read()
        assert b"200 OK" in ask(port, sample())


@pytest.mark.long
def test_only_this_machine_can_ask_unless_told_otherwise(server: Server) -> None:
    assert server.host == "127.0.0.1" and server.addresses() == {"127.0.0.1"}


@pytest.mark.long
def test_sigterm_ends_it(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    assert "Traceback" not in server.log.read_text()


def test_a_folder_without_a_reward_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-reward", str(tmp_path / "none")]) == 2
    assert "none has no config.json; name the folder of a reward model" in capsys.readouterr().err
    architecture = {"architectures": ["Qwen3ForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    assert main(["serve-reward", str(tmp_path)]) == 2
    assert (
        "scores steps, which a server cannot; use the reward `model` in the run"
        in capsys.readouterr().err
    )


@pytest.mark.long
def test_an_address_is_served_by_one_process(folder: Path, tmp_path: Path) -> None:
    with serve(folder, "--host", "0.0.0.0") as server:
        assert server.host == "0.0.0.0" and server.addresses() == {
            "0.0.0.0",
            "127.0.0.1",
        }  # the latter: torch
        port = ["--port", str(server.port)]
        second = subprocess.run(
            [*COMMAND, str(folder), *port], capture_output=True, text=True, timeout=120
        )
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 130
    assert second.returncode == 2
    assert f"--port={server.port} is refused (Address already in use" in second.stderr
