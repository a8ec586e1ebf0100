"""Converts a Hugging Face folder to a Megatron distributed checkpoint or back, and verifies it.

    source --read ahead--> target's files in .NAME.part, each with a record
      --read back--> checksums agree --> NAME

A record is written once its file is on disk, so a killed conversion resumes after the last record.
Every HF tensor's checksum is computed while the source is read (after rounding to a block format),
and again from the finished target. The conversion is a single process; it has a few parameters in
memory at a time, and the safetensors file that is being written.
"""

import pickle
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from megarl.checkpoint.conversion_map import OutputFile, TensorSource
from megarl.checkpoint.hf_files import HfTarget, copy_model_files
from megarl.checkpoint.pickles import read_pickle
from megarl.checkpoint.torch_dist import MegatronTarget
from megarl.processes.files import causes, sync_path, write_atomic
from megarl.types import CheckFailed
from megarl.weights.plan.plan import first_few

READERS = 2  # number of threads, and of parameters read ahead of the writer
RECORDS = ".records"
CHECKSUMS = "checksums.megarl"


@dataclass(frozen=True)
class Conversion:
    source: TensorSource
    source_folder: Path
    target: HfTarget | MegatronTarget
    origin: Path  # folder of config and tokenizer
    identity: str  # only an interrupted conversion of the same identity is continued
    progress: Callable[[str, int], None]  # ("write" or "verify", additional bytes)

    def run(self, folder: Path) -> int:
        """Writes and verifies `folder`. Returns the number of bytes that an earlier, interrupted
        conversion had written.

        Raises ValueError if `folder` exists, CheckFailed if the disk fails or data differs.
        """
        if folder.exists():
            raise ValueError(f"{folder} already exists; remove it, or choose another folder")
        files = self.target.files
        staging = folder.with_name(f".{folder.name}.part")
        records = _resume(staging, self.identity)
        with ThreadPoolExecutor(READERS) as readers:
            missing = [file for file in files if file.name not in records]
            resumed = sum(file.nbytes for file in files if file.name in records)
            self.progress("write", resumed)
            _require_space(staging, missing)
            for file in missing:
                records[file.name] = self._write(staging, file, readers)
            checksums = Counter()
            sources = Counter()
            for record in records.values():
                checksums.update(record["checksums"])
                sources.update(record["sources"])
            with _disk_errors(staging):
                copy_model_files(self.origin, staging)
                self.target.finish(staging, [records[file.name]["result"] for file in files])
            error = _changed_since_made(self.source_folder, _hexadecimal(sources))
            error = error or self._read_back(staging, checksums, readers)
            shutil.rmtree(staging / RECORDS)  # after an error, the next conversion starts over
            if error:
                raise CheckFailed(error)
            lines = (f"{value}  {name}\n" for name, value in _hexadecimal(checksums).items())
            write_atomic(staging / CHECKSUMS, "".join(lines))
            sync_path(staging)
            staging.rename(folder)
            sync_path(folder.parent)
        return resumed

    def _write(
        self,
        staging: Path,
        file: OutputFile,
        readers: ThreadPoolExecutor,
    ) -> dict[str, Any]:
        """Writes one file from scratch, then its record."""
        checksums = Counter()
        sources = Counter()

        def params() -> Iterator[tuple[str, Tensor]]:
            ahead = _ahead(readers, self._read, file.params)
            for param, (flat, sums, before) in zip(file.params, ahead, strict=True):
                checksums.update(sums)
                sources.update(before)
                self.progress("write", flat.nbytes)
                yield param, flat

        with _disk_errors(staging / file.name):
            result = self.target.write(staging, file, params())
            record = {"checksums": checksums, "sources": sources, "result": result}
            write_atomic(staging / RECORDS / f"{file.name}.pickle", pickle.dumps(record))
        return record

    def _read(self, param: str) -> tuple[Tensor, Counter[str], Counter[str]]:
        """Returns (parameter, its checksums in the target, its checksums in the source)."""
        flat = self.source.read(param)
        checksums = self.source.conversion_map.checksums
        before = checksums(param, flat)
        after = before
        rounded = self.target.rounded(param, flat)
        if rounded is not flat:
            after = checksums(param, rounded)
        return flat, after, before

    def _read_back(
        self,
        staging: Path,
        expected: Counter[str],
        readers: ThreadPoolExecutor,
    ) -> str:
        """Describes how the finished folder differs from the source; "" if it does not."""

        def read(param: str) -> Counter[str]:
            flat = written.read(param)
            self.progress("verify", flat.nbytes)
            return self.source.conversion_map.checksums(param, flat)

        params = chain.from_iterable(file.params for file in self.target.files)
        actual = Counter()
        try:
            written = self.target.reopen(staging)
            for sums in readers.map(read, params):
                actual.update(sums)
        except ValueError as error:
            return f"the written files cannot be read back: {error}"
        wrong = [name for name in expected if (expected[name] - actual[name]) % (1 << 64)]
        if not wrong:
            return ""
        return (
            f"{staging}: {first_few(wrong)} differ from the source when read back; run the "
            "conversion again, and check the disk and the memory if it fails twice"
        )


def _resume(staging: Path, identity: str) -> dict[str, dict[str, Any]]:
    """Returns {file name: record} for the files that an interrupted conversion completed.

    Empties a folder whose conversion had another identity.
    """
    known = staging / RECORDS / "identity"
    if not known.is_file() or known.read_text() != identity:
        shutil.rmtree(staging, ignore_errors=True)
        known.parent.mkdir(parents=True)
        write_atomic(known, identity)
    return {
        path.stem: read_pickle(path)
        for path in known.parent.glob("*.pickle")
        if (staging / path.stem).is_file()
    }


def _require_space(staging: Path, files: Sequence[OutputFile]) -> None:
    """Raises CheckFailed, before anything is written, if the disk has no room for these files."""
    for file in files:  # files that an interrupted conversion began
        (staging / file.name).unlink(missing_ok=True)
    needed = sum(file.nbytes for file in files)
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise CheckFailed(
            f"{staging}: not enough disk space: the conversion writes {needed} bytes, "
            f"{free} are free; make room, or choose another disk"
        )


def _hexadecimal(checksums: Counter[str]) -> dict[str, str]:
    return {name: f"{value % (1 << 64):016x}" for name, value in checksums.items()}


def _ahead(
    readers: ThreadPoolExecutor,
    read: Callable[[str], Any],
    params: Sequence[str],
) -> Iterator[Any]:
    """Yields `read(param)` in order, while threads read the next parameters."""
    pending = deque()
    for param in params:
        pending.append(readers.submit(read, param))
        if len(pending) > READERS:
            yield pending.popleft().result()
    for future in pending:
        yield future.result()


def _changed_since_made(source: Path, checksums: Mapping[str, str]) -> str:
    """Describes how a converted source differs from its list of checksums; "" if it does not."""
    file = source / CHECKSUMS
    if not file.is_file():
        return ""
    made = {line[18:]: line[:16] for line in file.read_text().splitlines()}
    wrong = [name for name, value in checksums.items() if made.get(name) != value]
    if not wrong:
        return ""
    return (
        f"{source}: {first_few(wrong)} changed since the folder was created, according to "
        f"{CHECKSUMS}; create it again, or remove {CHECKSUMS} if the change is intended"
    )


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raises CheckFailed, naming the file, if the disk is full or a read or write fails."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save wraps its stream's error
        reasons = [cause.strerror for cause in causes(error) if isinstance(cause, OSError)]
        reason = [*reasons, str(error)][0]
        raise CheckFailed(
            f"{path}: {reason}; fix this and run the same command again to resume"
        ) from error
