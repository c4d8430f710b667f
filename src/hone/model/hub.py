"""Upload of an exported directory to a model repository of the hub, by huggingface_hub.

The token is the one of `hf auth login` or HF_TOKEN; the hub is HF_ENDPOINT's. Neither is read here.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from hone.errors import DataError

_REFUSED = (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, httpx.HTTPError, OSError)


class HubRepository:
    """A model repository, made if it is not there.

    Args:
        name: `owner/name`, or a name of the user's own.
        is_private: of a new one; one that is there stays as it is.
        endpoint: of the hub; None: the one that huggingface_hub is set to.

    Raises:
        DataError: no token, no right to write, or no answer.
    """

    def __init__(self, name: str, *, is_private: bool = True, endpoint: str | None = None) -> None:
        self._api = HfApi(endpoint=endpoint)
        try:
            self.name = self._api.create_repo(name, private=is_private, exist_ok=True).repo_id
        except _REFUSED as error:
            raise DataError(
                f"{name}: no such repository could be made on {self._api.endpoint}: {_cause(error)}"
            ) from error

    def upload(self, folder: Path, message: str) -> str:
        """Every file of a directory, as one commit. Returns the address of the repository. Raises DataError."""
        try:
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except _REFUSED as error:
            raise DataError(f"{folder}: not uploaded to {self.name}: {_cause(error)}") from error
        return f"{self._api.endpoint}/{self.name}"


def _cause(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{first} Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
