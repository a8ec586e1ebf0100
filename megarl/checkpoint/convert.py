"""Converts a Hugging Face folder to a Megatron distributed checkpoint or back, in one process, and verifies it.

    source --read ahead--> target's files in .NAME.part, each with a record --read back--> checksums agree --> NAME

A record is written once its file is on disk, so a killed conversion resumes after the last one. Every HF tensor's
checksum is computed while the source is read (as a block format rounds it), and again from the finished target. Only a
few parameters are in memory at a time.
"""

from __future__ import annotations

import pickle
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.checkpoint.conversion_map import OutputFile, Source
from megarl.checkpoint.hf_files import HfTarget, copy_model_files
from megarl.checkpoint.pickles import read_pickle
from megarl.checkpoint.torch_dist import MegatronTarget
from megarl.platform.atomic import sync_path, write_atomic
from megarl.platform.disk import causes
from megarl.types import CheckFailed
from megarl.weights.plan import first_few

READERS = 2  # threads, and parameters read ahead of the writer
RECORDS, CHECKSUMS = ".records", "checksums.megarl"


@dataclass(frozen=True, slots=True)
class Converted:
    files: int
    tensors: int
    nbytes: int
    resumed: int  # bytes that an earlier, interrupted conversion had written


@dataclass(frozen=True)
class Conversion:
    source: Source
    source_folder: Path
    target: HfTarget | MegatronTarget
    origin: Path  # folder of config and tokenizer
    identity: str  # only an interrupted conversion of the same identity is continued
    progress: Callable[[str, int], None]  # ("write" or "verify", additional bytes)

    def run(self, folder: Path) -> Converted:
        """Writes, verifies `folder`. Raises ValueError if it exists, CheckFailed if the disk fails or data differs."""
        if folder.exists():
            raise ValueError(f"{folder} already exists; remove it, or choose another folder")
        files, staging = self.target.files, folder.with_name(f".{folder.name}.part")
        records = _resume(staging, self.identity)
        with ThreadPoolExecutor(READERS) as readers:
            resumed = sum(file.nbytes for file in files if file.name in records)
            self.progress("write", resumed)
            missing = [file for file in files if file.name not in records]
            self._refuse_full_disk(staging, missing)
            records |= {file.name: self._write(staging, file, readers) for file in missing}
            checksums, sources = Counter[str](), Counter[str]()
            for record in records.values():
                checksums.update(record["checksums"])
                sources.update(record["sources"])
            lines = _hexadecimal(checksums)
            with _disk_errors(staging):
                copy_model_files(self.origin, staging)
                self.target.finish(staging, [records[file.name]["result"] for file in files])
            error = _changed_since_made(self.source_folder, _hexadecimal(sources))
            error = error or self._read_back(staging, checksums, readers)
            shutil.rmtree(staging / RECORDS)  # after an error everything is rewritten
            if error:
                raise CheckFailed(error)
            write_atomic(
                staging / CHECKSUMS, "".join(f"{value}  {name}\n" for name, value in lines.items())
            )
            sync_path(staging)
            staging.rename(folder)
            sync_path(folder.parent)
        return Converted(len(files), len(lines), sum(file.nbytes for file in files), resumed)

    def _refuse_full_disk(self, staging: Path, files: Sequence[OutputFile]) -> None:
        """Raises CheckFailed, before anything is written, with the first file that would not fit."""
        free = shutil.disk_usage(staging).free
        left = free + sum(
            (staging / f.name).stat().st_blocks * 512 for f in files if (staging / f.name).exists()
        )
        for file in files:
            left -= file.nbytes
            if left < 0:
                sizes = f"the conversion writes {sum(file.nbytes for file in files)} bytes, {free} are free"
                problem = f"not enough disk space for {self._tensor(file.params[0])}: {sizes}"
                raise CheckFailed(
                    f"{staging / file.name}: {problem}; make room, or choose another disk"
                )

    def _tensor(self, param: str) -> str:
        return self.source.conversion_map.hf_slices[param][0].name

    def _write(
        self, staging: Path, file: OutputFile, readers: ThreadPoolExecutor
    ) -> dict[str, Any]:
        """Write one file from scratch, then its record."""
        checksums, sources = Counter[str](), Counter[str]()
        current = file.params[0]

        def params() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            ahead = _ahead(readers, self._read, file.params)
            for current, (flat, sums, before) in zip(file.params, ahead, strict=True):
                checksums.update(sums)
                sources.update(before)
                self.progress("write", flat.nbytes)
                yield current, flat

        path = staging / file.name
        with _disk_errors(path, lambda: self._tensor(current)):
            result = self.target.write(staging, file, params())
            record = {"checksums": checksums, "sources": sources, "result": result}
            write_atomic(staging / RECORDS / f"{file.name}.pickle", pickle.dumps(record))
        return record

    def _read(self, param: str) -> tuple[Tensor, Counter[str], Counter[str]]:
        """Returns the parameter, and its checksums in the target and in the source."""
        flat = self.source.read(param)
        before = self.source.conversion_map.checksums(param, flat)
        rounded = self.target.rounded(param, flat)
        return (
            flat,
            before if rounded is flat else self.source.conversion_map.checksums(param, rounded),
            before,
        )

    def _read_back(self, staging: Path, expected: Counter[str], readers: ThreadPoolExecutor) -> str:
        """Describes how the finished folder differs from the source, naming tensors; "" if it does not."""

        def read(param: str) -> Counter[str]:
            flat = written.read(param)
            self.progress("verify", flat.nbytes)
            return self.source.conversion_map.checksums(param, flat)

        actual: Counter[str] = Counter()
        try:
            written = self.target.reopen(staging)
            for sums in readers.map(
                read, [param for file in self.target.files for param in file.params]
            ):
                actual.update(sums)
        except ValueError as error:
            return f"the written files cannot be read back: {error}"
        remedy = "run the conversion again, and check the disk and the memory if it fails twice"
        wrong = [name for name in expected if (expected[name] - actual[name]) % (1 << 64)]
        return (
            f"{staging}: {first_few(wrong)} differ from the source when read back; {remedy}"
            if wrong
            else ""
        )


def _resume(staging: Path, identity: str) -> dict[str, dict[str, Any]]:
    """Returns the records of files that an interrupted conversion completed; empties a folder with another identity."""
    known = staging / RECORDS / "identity"
    if not known.is_file() or known.read_text() != identity:
        shutil.rmtree(staging, ignore_errors=True)
        known.parent.mkdir(parents=True)
        write_atomic(known, identity)
    records = {path.stem: read_pickle(path) for path in known.parent.glob("*.pickle")}
    return {name: record for name, record in records.items() if (staging / name).is_file()}


def _hexadecimal(checksums: Counter[str]) -> dict[str, str]:
    return {name: f"{value % (1 << 64):016x}" for name, value in checksums.items()}


def _ahead(
    readers: ThreadPoolExecutor, read: Callable[[str], Any], params: Sequence[str]
) -> Iterator[Any]:
    """Yields `read(param)` in order, while threads read the next parameters."""
    pending: deque[Future[Any]] = deque()
    try:
        for number in range(len(params) + READERS):
            if number < len(params):
                pending.append(readers.submit(read, params[number]))
            if number >= READERS:
                yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _changed_since_made(source: Path, checksums: Mapping[str, str]) -> str:
    """Describes how a converted source differs from its own list of checksums; "" if it does not or has none."""
    if not (source / CHECKSUMS).is_file():
        return ""
    made = {line[18:]: line[:16] for line in (source / CHECKSUMS).read_text().splitlines()}
    remedy = f"according to {CHECKSUMS}; create it again, or remove {CHECKSUMS} if the change is intended"
    wrong = [name for name, value in checksums.items() if made.get(name) != value]
    return (
        f"{source}: {first_few(wrong)} changed since the folder was created, {remedy}"
        if wrong
        else ""
    )


@contextmanager
def _disk_errors(path: Path, tensor: Callable[[], str] | None = None) -> Iterator[None]:
    """Raises CheckFailed, naming file and tensor, if the disk is full or a read or write fails."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save wraps its stream's error
        reason = next(
            (cause.strerror for cause in causes(error) if isinstance(cause, OSError)), str(error)
        )
        during = f" while writing {tensor()}" if tensor else ""
        raise CheckFailed(
            f"{path}: {reason}{during}; fix this and run the same command again to resume"
        ) from error
