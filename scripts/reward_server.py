"""A complete reward server: ``python scripts/reward_server.py 8000``, used in a config by
``rewards: [{name: "http://localhost:8000/score"}]``. megarl/rewards/remote.py describes the protocol.
For a reward model, run ``megarl serve-reward FOLDER --port 8000`` instead."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(sample: dict[str, Any]) -> float:
    return float(sample["response"].strip() == sample["answer"])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [{"id": sample["id"], "score": score(sample)} for sample in request["samples"]]
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)  # port 0 picks a free one
    server.serve_forever()
