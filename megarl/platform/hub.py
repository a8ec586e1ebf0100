"""Downloads models and datasets from the Hugging Face hub, or from its cache if it is unreachable.

huggingface_hub's environment variables apply.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Repository:
    """A model or dataset on the hub, and the config keys that name it, for errors."""

    kind: Literal["model", "dataset"]
    id: str
    revision: str | None  # None: main
    name: str  # config key and value, for example model.path=org/name
    revision_key: str  # config key of the revision

    def download(
        self,
        patterns: Sequence[str] | None,
        *,
        ignored: Sequence[str] = (),
        progress: bool,
    ) -> Path:
        """Downloads the files that match `patterns` (None: all) and not `ignored`.

        Returns their folder, which is named by the commit. Raises ValueError with the cause and a
        remedy if the download fails.
        """
        from huggingface_hub import constants, snapshot_download

        # HTTPError is a class of httpx
        from huggingface_hub.errors import (
            HTTPError,  # pyright: ignore[reportPrivateImportUsage]
            XetDownloadError,
        )
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            (enable_progress_bars if progress and sys.stderr.isatty() else disable_progress_bars)()
        try:
            return Path(
                snapshot_download(
                    self.id,
                    repo_type=self.kind,
                    revision=self.revision,
                    allow_patterns=None if patterns is None else [*patterns],
                    ignore_patterns=[*ignored],
                )
            )
        except (OSError, HTTPError, XetDownloadError, RuntimeError, ValueError) as error:
            raise ValueError(f"{self.name} {self._explain(error)}") from error

    def _explain(self, error: Exception) -> str:
        from huggingface_hub import constants, errors

        cause = " ".join(str(error.__cause__ or error).split())[:200]
        cache = f"the cache {constants.HF_HUB_CACHE}"
        match error:
            case errors.GatedRepoError():
                return "is gated; accept its terms on its page on the hub, and set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                return (
                    f"is neither local nor a {self.kind} that {constants.ENDPOINT} shows you; "
                    "correct it, or set HF_TOKEN if it is private"
                )
            case errors.RevisionNotFoundError():
                return (
                    f"has no revision {self.revision}; set {self.revision_key} to a branch, tag or "
                    "commit of it"
                )
            case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
                kind = "" if self.kind == "model" else f"--repo-type {self.kind} "
                return (
                    f"is no folder in {Path.cwd()} and not completely in {cache}, and "
                    f"HF_HUB_OFFLINE is set; unset it, or run `hf download {kind}{self.id}` online"
                )
            case errors.LocalEntryNotFoundError():
                return (
                    f"is no folder in {Path.cwd()} and not completely in {cache}, and "
                    f"{constants.ENDPOINT} cannot be used ({cause}); check network and HF_ENDPOINT"
                )
            case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
                return (
                    f"cannot be downloaded: {constants.ENDPOINT} refuses HF_TOKEN ({cause}); renew "
                    "it, or unset it"
                )
            case OSError() if error.errno is not None:
                return (
                    f"cannot be downloaded: {cache} cannot be written ({error}); free space there, "
                    "or set HF_HOME"
                )
            case _:
                return f"cannot be downloaded ({cause}); start again: complete files are kept"
