"""Writes a distributed checkpoint: plans it at once, then writes the files on a thread.

    host copies -> plan (collective) -> [thread: files, checksums] -> agree (collective) -> metadata -> manifest

The thread replaces Megatron-Core's writer processes, which 0.16 would fork from a process that runs an engine. It does
disk work only; all collectives run on the caller's thread.
"""

from __future__ import annotations

import errno
import inspect
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.checkpoint import files
from megarl.platform.disk import full_disk
from megarl.types import CheckFailed
from megarl.weights.transports.values import gather_values


class Writing:
    """Constructing it starts the write, `finish` completes it; every rank does both, in the same order."""

    def __init__(self, common: dict[str, Any], sharded: dict[str, Any], folder: Path) -> None:
        """`common`: plain data, the same on every rank; `sharded`: must not change until `finish`; `folder`: empty."""
        self.folder = folder
        self._error = ""
        self._sums: files.Sums = {}
        # by default every rank spawns a process for this queue, though its writer and reader are threads here
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
        # 0.19 delegates the write to another package by default
        has_option = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
        options: dict[str, Any] = {"async_strategy": "mcore"} if has_option else {}
        state = {**common, **sharded}
        with _removing(folder):
            self._request: Any = dist_checkpointing.save(
                state, str(folder), async_sharded_save=True, **options
            )
            # 0.19 keeps this among the tensors, but reads the file of older versions first; readers here know one place
            if dist.get_rank() == 0 and not (file := folder / "common.pt").exists():
                torch.save(common, file)
        self._buckets = [] if self._request.async_fn is None else self._request.async_fn_args[1]
        self.thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Waits for all ranks' files, then completes the checkpoint. Raises CheckFailed if a rank could not write."""
        self.thread.join()
        with _removing(self.folder):
            errors = gather_values(self._error)
            if any(errors):
                rank = next(rank for rank, error in enumerate(errors) if error)
                raise CheckFailed(
                    f"checkpoint {self.folder} was not written: rank {rank}: {errors[rank]}"
                )
            for finalize in self._request.finalize_fns:  # .metadata and metadata.json, by rank 0
                finalize()
            by_rank = gather_values(self._sums)
            if dist.get_rank() == 0:
                written = {name: entry for sums in by_rank for name, entry in sums.items()}
                others = [path.name for path in self.folder.iterdir() if path.name not in written]
                files.write_manifest(self.folder, written | files.sums(self.folder, others))
            dist.barrier()

    def _write(self) -> None:
        try:
            results = {}
            for index, bucket in enumerate(self._buckets):
                results[index] = self._write_file(index, bucket)
                self._sums |= files.sums(self.folder, [bucket[1]])
            if self._buckets:
                self._request.async_fn_args[2].put(results)
        except Exception as error:  # noqa: BLE001 (in a thread: `finish` raises it)
            text = f"{type(error).__name__}: {error}"
            self._error = full_disk(error, self.folder, self._missing_bytes()) or " ".join(
                text.split()
            )
        self._buckets = []

    def _missing_bytes(self) -> int:
        """What this rank's files still lack."""
        expected = sum(tensor.nbytes for bucket in self._buckets for _, tensor in bucket[2][1])
        paths = [self.folder / bucket[1] for bucket in self._buckets]
        return max(0, expected - sum(path.stat().st_size for path in paths if path.exists()))

    def _write_file(self, index: int, bucket: Any) -> Any:
        transforms, *_ = self._request.async_fn.args
        results: queue.Queue[Any] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(index)
        write: Any = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        write(transforms, index, bucket, results, running, True)
        _, result = results.get()
        if isinstance(result, Exception):
            raise result
        return result


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    """Removes `folder` if an exception passes, so that a full disk has room again; a full disk becomes an OSError."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        full = full_disk(error, folder, missing_bytes=1)
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if full and not isinstance(error, CheckFailed):  # of this rank alone
            raise OSError(errno.ENOSPC, full) from error
        raise
