"""Hugging Face hub ids as `model.path`: cache, token, endpoint and offline mode are those of huggingface_hub.

    id, revision --download(SMALL)---> <cache>/.../snapshots/<commit>: all that a check or a plan needs
    id, commit   --download(WEIGHTS)-> the same folder, now with *.safetensors
    id, commit   --model_folder------> the same folder, without network

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply. If the hub cannot be reached, the cached commit is used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")  # config, tokenizer, chat template, index
CODE = ("*.py",)  # of a tokenizer
WEIGHTS = ("*.safetensors",)
IGNORED = ("*/*", "consolidated*")  # subfolders and Mistral's own format have the weights a second time
# as huggingface_hub validates it
HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w([\w.-]*\w)?/)?\w([\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)


def is_hub_id(path: str) -> bool:
    """Whether `path` names a model on the hub: no folder of that name exists, and it has the form of an id."""
    return not _expanded(path).is_dir() and HUB_ID.fullmatch(path) is not None


def model_folder(path: str, revision: str | None) -> Path:
    """Returns the folder `path`, or that of a hub id in the cache, if `download` was called for it."""
    if is_hub_id(path):
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json", revision=revision)
        if isinstance(file, str):
            return Path(file).parent
    return _expanded(path)


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # unlike Path.expanduser, leaves the name of an unknown user as it is


def download(path: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads the top-level files of a hub id that match `patterns`; returns their folder, named by the commit.

    Raises ValueError with the value and the remedy: each way of failing is the user's to correct.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HTTPError, XetDownloadError  # pyright: ignore[reportPrivateImportUsage] (httpx's)
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        (enable_progress_bars if patterns == WEIGHTS and sys.stderr.isatty() else disable_progress_bars)()
    try:
        folder = Path(
            snapshot_download(path, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*IGNORED])
        )
    except (OSError, HTTPError, XetDownloadError, RuntimeError) as error:
        raise ValueError(_explain(error, path, revision)) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path={path} has no config.json on the hub; choose a model in Hugging Face format")
    if patterns == WEIGHTS and not any(folder.glob(WEIGHTS[0])):
        raise ValueError(
            f"model.path={path} has no *.safetensors on the hub, and .bin and .gguf files are not read; choose a "
            "repository or a model.revision with safetensors"
        )
    return folder


def _explain(error: Exception, path: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    cause = " ".join(str(error.__cause__ or error).split())[:200]
    cache = f"the cache {constants.HF_HUB_CACHE}"
    match error:
        case errors.GatedRepoError():
            return f"model.path={path} is gated; accept its terms on its page on the hub, and set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return (
                f"model.path={path} is neither a folder nor a model that {constants.ENDPOINT} shows you; correct it, "
                "or set HF_TOKEN if the model is private"
            )
        case errors.RevisionNotFoundError():
            return f"model.revision={revision} does not exist in {path}; choose a branch, tag or commit of it"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"model.path={path} is not a folder, not completely in {cache}, and HF_HUB_OFFLINE is set; "
                f"unset it, or run `hf download {path}` where there is a network"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"model.path={path} is not a folder, not completely in {cache}, and {constants.ENDPOINT} cannot be "
                f"used ({cause}); check network and HF_ENDPOINT, or correct the path"
            )
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"model.path={path}: {constants.ENDPOINT} refuses HF_TOKEN ({cause}); renew it, or unset it"
        case OSError() if error.errno is not None:
            return f"model.path={path}: {cache} cannot be written ({error}); free space there, or set HF_HOME"
        case _:
            return f"model.path={path}: the download failed ({cause}); start again: complete files are kept"
