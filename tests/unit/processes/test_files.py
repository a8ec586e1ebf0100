"""A file that is being replaced is the old one or the new one, never a part; a failure leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.processes.files import replacing, write_atomic


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    write_atomic(file, "old")
    with replacing(file) as staging:
        staging.write_text("ne")
        assert staging.parent == tmp_path and file.read_text() == "old"
        staging.write_text("new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    write_atomic(file, b"old")
    with pytest.raises(OSError, match="full"), replacing(file) as staging:
        staging.write_text("half")
        raise OSError("full")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
