"""A folder with a tokenizer.model, whose first bytes are a protobuf's."""

import json

from megarl.config.random_model import hf_config
from megarl.config.schema import Create


def make(folder):
    (folder / "model").mkdir()
    (folder / "model/tokenizer.model").write_bytes(b"\n\x0e")
    (folder / "model/config.json").write_text(json.dumps(hf_config(Create())))
