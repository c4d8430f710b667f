"""Pictures of prompts: the files that describe how a model's processor turns a picture into input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What vision-language models have beside weights and tokenizer."""


def processor_files(place: str, *, offline: bool) -> Mapping[str, str]:
    """Names and contents of a model's processor files; none for a model that reads text alone.

    Args:
        place: a directory, or a hub name.
        offline: look into the cache alone, for a hub name.
    """
    found: dict[str, str] = {}
    for name in PROCESSOR_FILES:
        file = Path(place) / name
        if not Path(place).is_dir():
            try:
                file = Path(hf_hub_download(place, name, local_files_only=offline))
            except (EntryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
                continue
        if file.is_file():
            found[name] = file.read_text(encoding="utf-8")
    return found
