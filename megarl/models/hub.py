"""Resolves and downloads Hugging Face hub ids: `model.path`, and other models with `@revision`
(`teacher.model: org/name@v1`).

id, revision --download(SMALL)---> <cache>/.../snapshots/<commit>: what a check or a plan needs
id, commit   --download(WEIGHTS)-> the same folder, now with *.safetensors
id, commit   --model_folder------> the same folder, without network
"""

import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megarl.platform.hub import Repository

# config, tokenizer, chat template, index
SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
CODE = ("*.py",)  # code of a tokenizer
WEIGHTS = ("*.safetensors",)
# subfolders and files in Mistral's format duplicate the weights
IGNORED = ("*/*", "consolidated*")
# the pattern that huggingface_hub accepts
HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]*\w)?/)?\w([\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)


def is_hub_id(path: str) -> bool:
    """Returns True if `path` has the form of an id, and no folder has that name."""
    return not _expanded(path).exists() and HUB_ID.fullmatch(path) is not None


def split_revision(path: str) -> tuple[str, str | None]:
    """Splits `id@revision` into (id, revision or None). Returns the path of a folder unchanged."""
    name, _, revision = path.partition("@")
    if is_hub_id(name) and not _expanded(path).is_dir():
        return name, revision or None
    return path, None


def model_folder(path: str, revision: str | None = None) -> Path:
    """Returns the folder `path`; for a hub id that has been downloaded, its folder in the
    cache."""
    if revision is None:
        path, revision = split_revision(path)
    if is_hub_id(path):
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json", revision=revision)
        if isinstance(file, str):
            return Path(file).parent
    return _expanded(path)


def copied_files(folder: Path) -> list[Path]:
    """Returns the files that a copy of the model has in addition to its weights: config, tokenizer
    and its code, but no index and no Megatron metadata.json.

    Raises ValueError for a link that is broken or leaves the folder, except to a hub cache's blobs.
    """
    home = folder.resolve()
    places = [home]
    if home.parent.name == "snapshots":
        places.append(home.parents[1] / "blobs")
    files = []
    for file in sorted(chain.from_iterable(map(folder.glob, (*SMALL, *CODE)))):
        if file.name.endswith(".index.json") or file.name == "metadata.json":
            continue
        target = Path(os.path.realpath(file))
        if not file.is_file() or not any(map(target.is_relative_to, places)):
            raise ValueError(
                f"{file} links to {target}, outside the folder or no file, so a copy of the model "
                "would not be this model; replace the link by the file"
            )
        files.append(file)
    return files


def _expanded(path: str) -> Path:
    # unlike Path.expanduser, this leaves the name of an unknown user unchanged
    return Path(os.path.expanduser(path))


def download(
    path: str,
    revision: str | None,
    patterns: Sequence[str],
    where: str,
) -> Path:
    """Downloads a hub id's top-level files that match `patterns`. Returns their folder, which is
    named by the commit. Raises ValueError, naming `where` (the setting and its value), if the model
    has no config.json or no weights."""
    revision_key = "model.revision" if where.startswith("model.path") else "its part after @"
    repository = Repository("model", path, revision, where, revision_key)
    folder = repository.download(patterns, ignored=IGNORED, progress=patterns == WEIGHTS)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{where} has no config.json on the hub; choose a model in Hugging Face format"
        )
    if patterns == WEIGHTS and not any(folder.glob(WEIGHTS[0])):
        raise ValueError(
            f"{where} has no *.safetensors on the hub, and .bin and .gguf are not read; choose "
            "one that has"
        )
    return folder
