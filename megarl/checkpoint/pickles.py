"""Checks the pickles of a checkpoint before other code loads them (see patches.checkpoints)."""

import io
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megarl.patches.checkpoints import UnsafePickleError, load_object, load_pickle


def read_pickle(file: Path) -> Any:
    with file.open("rb") as stream:
        return load_pickle(stream)


def check_pickles(folder: Path) -> None:
    """Loads all pickles of a checkpoint safely, but no tensors.

    Raises ValueError naming the file that is unsafe or damaged.
    """
    file = folder / ".metadata"
    try:
        metadata = read_pickle(file)
        files = {path.name for path in folder.glob("*.distcp")}
        for index, place in metadata.storage_data.items():
            if place.relative_path not in files:
                raise ValueError(
                    f"{index.fqn} is in {place.relative_path}, which is not in the checkpoint"
                )
            if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
                file = folder / place.relative_path
                with file.open("rb") as stream:
                    stream.seek(place.offset)
                    load_object(io.BytesIO(stream.read(place.length)), file)
        file = folder / "common.pt"
        load_object(io.BytesIO(file.read_bytes()), file)
    except UnsafePickleError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle fails in many ways)
        raise ValueError(f"{file.name} cannot be read ({error!r})") from None
