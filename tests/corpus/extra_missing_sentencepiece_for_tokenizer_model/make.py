"""A folder with a tokenizer.model, whose first bytes are a protobuf's."""


def make(folder):
    (folder / "model/tokenizer.model").write_bytes(b"\n\x0e")
