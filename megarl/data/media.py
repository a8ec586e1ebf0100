"""Refuses rows and models with images, audio or video, because megarl trains on text only.

With `task.ignore_media`, the text of such rows is used, without the placeholders of their media.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megarl.models.config_json import read_config

# names of columns, and types of a message's parts
NAMES = """
    image images image_url input_image audio audios audio_url input_audio
    video videos video_url input_video
"""
MEDIA = frozenset(NAMES.split())
FEATURE = re.compile(r"\b(Image|Audio|Video)\(")  # in the repr of a feature of `datasets`
PLACEHOLDER = re.compile(r"<(image|audio|video)>\n?")


def refuse_media(where: object, names: Sequence[str], *, ignore: bool) -> None:
    if names and not ignore:
        raise ValueError(
            f"{where} has {', '.join(names)}, but megarl trains on text; choose text only, or set "
            "task.ignore_media=true to leave images, audio and video out"
        )


def check_model_media(folder: Path, *, ignore: bool) -> None:
    """Raises ValueError if the model in `folder` reads more than text, unless `ignore`."""
    raw = read_config(folder / "config.json").raw
    names = [key for key in ("vision_config", "audio_config", "video_config") if raw.get(key)]
    names += [file.name for file in folder.glob("*processor_config.json")]
    refuse_media(f"the model {folder}", names, ignore=ignore)
