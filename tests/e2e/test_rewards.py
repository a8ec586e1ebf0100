"""Rewards that fail in a real run: it goes on, and metrics.jsonl counts each cause under its own name."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


class Unreliable(BaseHTTPRequestHandler):
    """Scores the share of even ids; of the samples 0 to 4 of a prompt it does not, each for another reason."""

    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        index = int(rows[0]["id"].split("/")[1])  # batch_size is 1
        ids = list(map(int, rows[0]["response"].split()))
        score = sum(number % 2 == 0 for number in ids) / max(len(ids), 1)
        entries = {
            0: [{"id": rows[0]["id"], "score": float("nan")}],
            1: [],
            2: [{"id": "1000/0", "score": score}],
        }.get(index, [{"id": rows[0]["id"], "score": score}])
        body = json.dumps({"scores": entries}).encode() if index != 3 else b" " * 10_000_000
        if index == 5:
            return  # closes the connection
        self.send_response(500 if index == 4 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A client that stops reading a 10 MB answer."""


def test_a_run_with_bad_servers_and_bad_code_goes_on(tmp_path):
    server = Quiet(("127.0.0.1", 0), Unreliable)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    task = tmp_path / "task.jsonl"
    rows = [
        {"prompt": f"{n % 60 + 4} {n // 60 + 4}", "tests": ["assert f(1) == 1"]} for n in range(64)
    ]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [
        {
            "name": url,
            "options": {"batch_size": 1, "retries": 1, "backoff_s": 0.01, "timeout_s": 20},
        },
        {"name": "code", "weight": 0.1, "options": {"time_s": 20}},
    ]
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        str(ROOT / "configs/tiny_dense.yaml"),
        f"run.dir={tmp_path}",
    ]
    command += [
        f"task={{name: 'jsonl:{task}', template: plain}}",
        "train.steps=2",
        "train.prompts_per_step=4",
    ]
    command += ["algorithm.filter_zero_std=false"]
    command += [f"rewards={yaml.safe_dump(rewards, default_flow_style=True, width=10_000)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "tiny_dense" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 2
    causes = ("nan", "missing_id", "unknown_id", "too_large", "http_500", "broken")
    for line in lines:
        assert {cause: line[f"reward/{url}/{cause}"] for cause in causes} == dict.fromkeys(
            causes, 4
        )
        assert line["samples/dropped"] == 4 * len(causes) and line["samples/count"] == 4 * (
            8 - len(causes)
        )
        assert line["reward/code/syntax"] >= 1  # "5 17 3" is no program, and the policy's own fault
        assert 0 < line[f"reward/{url}/mean"] < 1 and line["grad_norm"] > 0


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Even(BaseHTTPRequestHandler):
    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        ids = [[int(x) % 2 for x in row["response"].split()] for row in rows]
        scores = [{"id": row["id"], "score": 1 - sum(x) / max(len(x), 1)} for row, x in zip(rows, ids)]
        time.sleep(0.2)
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Even)
print(server.server_port, flush=True)
server.serve_forever()
"""


def start_server(port: int = 0) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_server_that_dies_ends_the_run_which_resumes_when_it_is_back(tmp_path):
    server, port = start_server()
    options = {
        "retries": 10_000,
        "backoff_s": 0.1,
        "total_s": 5,
    }  # the last is what ends the waiting
    rewards = yaml.safe_dump(
        [{"name": f"http://127.0.0.1:{port}/score", "options": options}], default_flow_style=True
    )
    command = [sys.executable, "-m", "megarl.cli", "train", str(ROOT / "configs/tiny_dense.yaml")]
    command += [
        f"run.dir={tmp_path}",
        "train.steps=8",
        "train.prompts_per_step=4",
        "checkpoint.every=100",
    ]
    command += [f"rewards={rewards}"]
    folder = tmp_path / "tiny_dense"

    def steps() -> list[int]:
        file = folder / "metrics.jsonl"
        return (
            [json.loads(line)["step"] for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )

    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and len(steps()) < 2:
        time.sleep(0.02)
    server.kill()
    server.wait()
    message = run.communicate(timeout=300)[1]
    assert run.returncode == 3 and message.count("\n") == 1, message
    assert (
        f"the reward http://127.0.0.1:{port}/score is gone" in message
        and "start its server again" in message
    )
    done = steps()
    assert 2 <= len(done) < 8 and [
        path.name for path in (folder / "checkpoints").glob("step_*")
    ] == [f"step_{len(done)}"]
    server, _ = start_server(port)
    try:
        resumed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    finally:
        server.kill()
        server.wait()
    assert resumed.returncode == 0, resumed.stderr
    assert steps() == [*range(8)]
