from __future__ import annotations

from pathlib import Path

import pytest

from megarl.platform.json_text import parse_json, read_json


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "it has 'c' twice"),
        (b'{"\\u0061": 1, "a": 2}', "it has 'a' twice"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("{", "line 1 column 2"),
        (b"\xff\xfe\xfd", "codec can't decode"),
        ("1" * 5000, "Exceeds the limit"),
    ],
)
def test_what_is_refused_names_the_place(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^rows\.jsonl line 7 is not JSON \(.*\)$") as caught:
        parse_json(text, "rows.jsonl line 7")
    assert problem in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes('\ufeff{"a": [{"b": 1}, {"b": 2}]}'.encode())
    assert read_json(file) == {"a": [{"b": 1}, {"b": 2}]}
    file.write_bytes(b"{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_json(file)
