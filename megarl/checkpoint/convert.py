"""HF folder <-> Megatron distributed checkpoint, streamed through one process, proven before it gets its name.

    source --read--> target's files in .NAME.part, each with a record --read back--> checksums agree --> NAME

A record is written when its file is whole and on disk, so a conversion that was killed goes on behind the last one.
Every HF tensor's checksum is taken from the source as it is read, and again from the finished target, opened as any
reader would open it. Memory: a few groups of at most 16 MiB, whatever the model.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megarl.checkpoint.sides import File, Source, Target
from megarl.types import CheckFailed

__all__ = ["Converted", "convert"]

READERS = 2  # threads
AHEAD = 2 * READERS  # units that are read before they are written
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")  # config, tokenizer and its code, as they came
RECORDS, SUMS = ".records", "checksums.megarl"

Progress = Callable[[str, int], None]  # ("write" | "verify", bytes of it)


@dataclass(frozen=True, slots=True)
class Converted:
    files: int
    tensors: int
    nbytes: int
    resumed: int  # bytes that an earlier, interrupted conversion had written
    digests: Mapping[str, str]  # HF tensor -> checksum of its elements, the same on both sides


def convert(
    folder: Path,
    *,
    source: Source,
    source_folder: Path,
    target: Target,
    origin: Path,  # where config and tokenizer are copied from
    identity: Mapping[str, Any],  # what makes an interrupted conversion the same one
    progress: Progress,
) -> Converted:
    """Write `folder` whole, or leave none of that name.

    Raises ValueError when it exists, CheckFailed when the disk is full or what was written is not what was read.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; remove it, or name another folder")
    staging = folder.with_name(f".{folder.name}.part")
    with _claimed(staging, identity):
        records = _records(staging, target.files)
        done = sum(file.nbytes for file in target.files if file.name in records)
        progress("write", done)
        _refuse_full(staging, [file for file in target.files if file.name not in records], target)
        with ThreadPoolExecutor(1) as flusher, _readers() as readers:
            flushed = []  # a file reaches the disk while the next one is made, and while the last ones are proven
            for file in target.files:
                if file.name not in records:
                    records[file.name] = _write(staging, file, source, target, readers, progress)
                    flushed.append(flusher.submit(_record, staging, file, records[file.name]))
            before: Counter[str] = Counter()
            for record in records.values():
                before.update(record["digests"])
            digests = {name: f"{value % (1 << 64):016x}" for name, value in before.items()}
            wrong = _compare_sums(source_folder, digests)
            _copy(origin, staging)
            with _disk(staging / "its index"):
                target.finish(staging, [item for file in target.files for item in records[file.name]["written"]])
            wrong = wrong or _prove(staging, target, readers, before, progress)
            for future in flushed:
                future.result()
        if wrong:
            shutil.rmtree(staging / RECORDS)  # the next conversion writes the files again
            raise CheckFailed(wrong)
        (staging / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in digests.items()))
        shutil.rmtree(staging / RECORDS)
        _sync(staging)
        staging.rename(folder)
        _sync(folder.parent)
    nbytes = sum(file.nbytes for file in target.files)
    return Converted(len(target.files), len(digests), nbytes, done, digests)


@contextmanager
def _claimed(staging: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """What an earlier, interrupted conversion left, if it was this one; else an empty folder. One process at a time."""
    lock = staging.with_name(f"{staging.name}.lock")
    staging.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{staging} is being written by another conversion; wait for it, or stop it") from None
        told = staging / RECORDS / "identity.json"
        text = json.dumps(identity, sort_keys=True)
        if not told.is_file() or told.read_text() != text:
            shutil.rmtree(staging, ignore_errors=True)
            told.parent.mkdir(parents=True)
            _write_atomic(told, text)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _records(staging: Path, files: Iterable[File]) -> dict[str, Any]:
    """What is known of the files that are whole."""
    found = {}
    for file in files:
        told, written = staging / RECORDS / f"{file.name}.json", staging / file.name
        if told.is_file() and written.is_file():
            record = json.loads(told.read_text())
            if record["size"] == written.stat().st_size:
                found[file.name] = record
    return found


def _refuse_full(staging: Path, files: Sequence[File], target: Target) -> None:
    """Say before the first byte where the disk would be full."""
    stat = os.statvfs(staging)
    free = stat.f_bavail * stat.f_frsize
    left = free + sum((staging / f.name).stat().st_blocks * 512 for f in files if (staging / f.name).exists())
    for file in files:
        if file.nbytes > left:
            tensor = target.tensor(file.units[min(len(file.units) - 1, len(file.units) * left // file.nbytes)])
            raise CheckFailed(
                f"{staging / file.name}: no space left on the disk for {tensor}: "
                f"{sum(file.nbytes for file in files)} bytes are to be written, {free} are free"
            )
        left -= file.nbytes


@contextmanager
def _readers() -> Iterator[Executor]:
    """Threads that read, instead of torch's own."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(READERS) as readers:
            yield readers
    finally:
        torch.set_num_threads(count)


def _write(
    staging: Path, file: File, source: Source, target: Target, readers: Executor, progress: Progress
) -> dict[str, Any]:
    """One file, from its first byte; what a record of it holds."""
    digests: Counter[str] = Counter()
    written: list[Any] = []
    path, tensor = staging / file.name, target.tensor(file.units[0])
    ahead: deque[Future[tuple[Tensor, list[tuple[str, int]]]]] = deque()
    with _created(path) as stream:
        with _disk(path, tensor):
            target.begin(stream, file)
        units = iter(file.units)
        try:
            for unit in file.units:
                while len(ahead) < AHEAD and (following := next(units, None)) is not None:
                    ahead.append(readers.submit(target.fetch, source, following))
                flat, sums = ahead.popleft().result()
                with _disk(path, tensor := target.tensor(unit)):
                    written += target.write(stream, file, unit, flat)
                for name, value in sums:
                    digests[name] += value
                progress("write", flat.nbytes)
            with _disk(path, tensor):
                stream.flush()
        finally:
            for future in ahead:
                future.cancel()
    return {"digests": digests, "written": written}


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, whose last bytes are not tried again where the disk was full."""
    stream = path.open("wb")
    try:
        yield stream
    except BaseException:
        with suppress(OSError):
            stream.close()
        raise
    stream.close()


def _record(staging: Path, file: File, record: Mapping[str, Any]) -> None:
    path = staging / file.name
    with _disk(path):
        _sync(path)
        _write_atomic(staging / RECORDS / f"{file.name}.json", json.dumps({**record, "size": path.stat().st_size}))


def _prove(staging: Path, target: Target, readers: Executor, before: Counter[str], progress: Progress) -> str:
    """Every tensor of the finished folder against what was read from the source; what is wrong, naming tensors."""
    units = [unit for file in target.files for unit in file.units]
    after: Counter[str] = Counter()

    def read(number: int) -> Counter[str]:
        sums = Counter[str]()
        for unit in units[number::READERS]:
            for name, value, nbytes in target.prove(written, unit):
                sums[name] += value
                progress("verify", nbytes)
        return sums

    try:
        written = target.reopen(staging)
        for sums in readers.map(read, range(READERS)):
            after.update(sums)
    except ValueError as error:
        return f"what was written cannot be read back: {error}"
    wrong = [name for name in before if (before[name] - after[name]) % (1 << 64)]
    if not wrong:
        return ""
    return (
        f"{staging}: {_few(wrong)} read back differ from the source; run the conversion again, "
        "and suspect the disk or the memory when that repeats itself"
    )


def _compare_sums(source: Path, digests: Mapping[str, str]) -> str:
    """A folder that a conversion made holds its checksums: it must still be what it was. What is wrong, or nothing."""
    if not (source / SUMS).is_file():
        return ""
    told = {line[18:]: line[:16] for line in (source / SUMS).read_text().splitlines()}
    wrong = [name for name, value in digests.items() if told.get(name) != value]
    if not wrong:
        return ""
    return (
        f"{source}: {_few(wrong)} are not what {SUMS} says they were when the folder was made: "
        f"make it again, or remove {SUMS} if they were changed on purpose"
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _copy(origin: Path, staging: Path) -> None:
    for pattern in COPIED:
        for file in origin.glob(pattern):
            if not file.name.endswith(".index.json") and file.name != "metadata.json":
                with _disk(staging / file.name):
                    shutil.copyfile(file, staging / file.name)


@contextmanager
def _disk(path: Path, tensor: str = "") -> Iterator[None]:
    """A disk that is full or a file that may not grow is said with the file and the tensor."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save wraps what its stream raised
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        said = cause.strerror if isinstance(cause, OSError) else str(error)
        what = f" while {tensor} was written" if tensor else ""
        raise CheckFailed(
            f"{path}: {said}{what}; make room and run the same command again: it goes on there"
        ) from error


def _write_atomic(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.new")
    part.write_text(text)
    _sync(part)
    os.replace(part, file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
