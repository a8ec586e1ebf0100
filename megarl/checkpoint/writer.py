"""Writes a distributed checkpoint: plans it immediately, then writes the files on a thread.

    host copies -> plan (collective) -> [thread: files, checksums]
      -> agree (collective) -> metadata -> manifest

The thread replaces Megatron-Core's writer processes, which 0.16 would fork from a process that runs
an engine. It does disk work only; all collectives run on the caller's thread.
"""

import errno
import inspect
import queue
import shutil
import threading
import traceback
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.checkpoint import files
from megarl.patches.checkpoints import queue_of_a_write
from megarl.processes.files import causes, full_disk
from megarl.types import CheckFailed
from megarl.weights.sync.transports.values import gather_values


class Writing:
    """A write that starts on construction and is completed by `finish`. Every rank calls both."""

    def __init__(self, common: dict[str, Any], sharded: dict[str, Any], folder: Path) -> None:
        """Plans the write and starts the thread. A collective.

        common: plain data, the same on every rank
        sharded: sharded tensors and objects, which must not change until `finish`
        folder: an empty folder
        """
        self.folder = folder
        self._error = ""
        self._sums = {}
        options: dict[str, Any] = {}
        # Megatron-Core 0.19 delegates the write to another package by default
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options = {"async_strategy": "mcore"}
        with _removing(folder), queue_of_a_write():
            self._request: Any = dist_checkpointing.save(
                {**common, **sharded}, str(folder), async_sharded_save=True, **options
            )
            # Megatron-Core 0.19 stores `common` among the tensors, but first looks for this file
            # of older versions, which is the only place that megarl reads
            file = folder / "common.pt"
            if dist.get_rank() == 0 and not file.exists():
                torch.save(common, file)
        self._buckets = []
        if self._request.async_fn is not None:
            self._buckets = self._request.async_fn_args[1]
        self.thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Waits for all ranks' files, then completes the checkpoint.

        Raises CheckFailed if a rank could not write.
        """
        self.thread.join()
        with _removing(self.folder):
            for rank, error in enumerate(gather_values(self._error)):
                if error:
                    raise CheckFailed(
                        f"checkpoint {self.folder} was not written: rank {rank}: {error}"
                    )
            for finalize in self._request.finalize_fns:  # .metadata and metadata.json, by rank 0
                finalize()
            written = ChainMap(*gather_values(self._sums))
            if dist.get_rank() == 0:
                others = [path.name for path in self.folder.iterdir() if path.name not in written]
                files.write_manifest(self.folder, {**written, **files.sums(self.folder, others)})
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
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._error = full_disk(error, self.folder, self._missing_bytes()) or text
            # Megatron's frame refers to the exception, which refers to the frame. Collecting such
            # a cycle with the view of a BytesIO in it crashes Python 3.12.1.
            for cause in causes(error):
                traceback.clear_frames(cause.__traceback__)
        self._buckets = []

    def _missing_bytes(self) -> int:
        """Returns the number of bytes that this rank still has to write."""
        missing = 0
        for bucket in self._buckets:
            missing += sum(tensor.nbytes for _, tensor in bucket[2][1])
            path = self.folder / bucket[1]
            if path.exists():
                missing -= path.stat().st_size
        return max(0, missing)

    def _write_file(self, index: int, bucket: Any) -> Any:
        transforms, *_ = self._request.async_fn.args
        results = queue.Queue()
        running = queue.Queue()
        running.put(index)
        write: Any = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        write(transforms, index, bucket, results, running, True)
        _, result = results.get()
        if isinstance(result, Exception):
            raise result
        return result


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    """Removes `folder` on an exception, so that a full disk has room again.

    Raises OSError if the exception is due to a full disk.
    """
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception
        full = full_disk(error, folder, missing_bytes=1)
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        if full and not isinstance(error, CheckFailed):  # only this rank failed
            raise OSError(errno.ENOSPC, full) from error
        raise
