import gzip


def make(folder):
    (folder / "l.jsonl").write_bytes(gzip.compress(b'{"prompt": "hi"}\n'))
