from __future__ import annotations

import json
from pathlib import Path


def make(folder: Path) -> None:
    file = folder / "model" / "tokenizer.json"
    values = json.loads(file.read_text())
    token = values["added_tokens"][-1] | {"id": 262, "content": "<tool>"}
    values["added_tokens"].append(token)
    file.write_text(json.dumps(values))
    rows = [
        {"prompt": f"{'<tool>' * (number == 431)}{number}", "answer": "1"} for number in range(600)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
