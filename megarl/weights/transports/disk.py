"""Buckets as files of a folder that all ranks see: engines on another machine, or a sync to be looked at afterwards.

    FOLDER/<n>-bucket-<source>-<destination>.safetensors    FOLDER/<n>-word-<rank>    (n: the rank's operations so far)

A file appears whole or not at all: it is written under another name and renamed. The receiver removes a bucket that it
has read. Every wait ends in time and names the ranks whose files did not come.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.types import CheckFailed

__all__ = ["Disk"]

POLL_S = 0.002


class Disk:
    """`folder` is empty at the start of a job, and of this job alone: what it holds is unpickled."""

    def __init__(self, folder: Path, *, rank: int, world: int, timeout_s: float = 600.0) -> None:
        self._folder = folder
        self.rank = rank
        self.world = world
        self._timeout_s = timeout_s
        self._operations = count()
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Callable[[], None]:
        number = next(self._operations)
        for peer, flat in sorted(outgoing.items()):
            self._write(
                self._bucket(number, self.rank, peer),
                lambda part, flat=flat: save_file({"bucket": flat.view(torch.uint8).cpu()}, part),
            )

        left = dict(incoming)

        def wait() -> None:
            while left:
                peer = min(left)
                file, flat = self._bucket(number, peer, self.rank), left.pop(peer)
                self._await([file], f"a bucket of {flat.nbytes} bytes of weights", [peer])
                flat.view(torch.uint8).copy_(load_file(file)["bucket"])
                file.unlink()

        return wait

    def barrier(self, what: str) -> None:
        self._exchange(None, what)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(values.cpu(), "a sum")).sum(0).to(values)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(values.cpu(), "a maximum")).amax(0).to(values)

    def gather(self, value: Any) -> list[Any]:
        return self._exchange(value, "a word of each rank")

    def _exchange(self, value: Any, what: str) -> list[Any]:
        number = next(self._operations)
        words = [self._folder / f"{number}-word-{rank}" for rank in range(self.world)]
        self._write(words[self.rank], lambda part: part.write_bytes(pickle.dumps(value)))
        self._await(words, what, range(self.world))
        found = [pickle.loads(word.read_bytes()) for word in words]
        # whoever is here has seen all words of the exchange before this one
        if number:
            for old in self._folder.glob(f"*-word-{self.rank}"):
                if int(old.name.split("-")[0]) < number:
                    old.unlink(missing_ok=True)
        return found

    def _await(self, files: list[Path], what: str, ranks: Iterable[int]) -> None:
        end = time.monotonic() + self._timeout_s
        while missing := [rank for rank, file in zip(ranks, files, strict=True) if not file.exists()]:
            if time.monotonic() > end:
                names = ", ".join(map(str, missing[:16]))
                raise CheckFailed(
                    f"{'rank' if len(missing) == 1 else 'ranks'} {names} of {self.world} did not come to {what} within "
                    f"{self._timeout_s:g} s: no {files[0].name} in {self._folder}; look at that log"
                )
            time.sleep(POLL_S)

    def _bucket(self, number: int, source: int, destination: int) -> Path:
        return self._folder / f"{number}-bucket-{source}-{destination}.safetensors"

    @staticmethod
    def _write(file: Path, write: Callable[[Path], object]) -> None:
        part = file.with_name(f".{file.name}.part")
        write(part)
        os.replace(part, file)
