import json


def make(folder):
    for name in ("config.json", "generation_config.json"):
        file = folder / "model" / name
        values = json.loads(file.read_text())
        values.pop("eos_token_id", None)
        file.write_text(json.dumps(values))
    file = folder / "model" / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values.pop("eos_token")
    file.write_text(json.dumps(values))
