"""Shared by all tests: one arithmetic thread, so that they are as fast beside each other as alone, file by file."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own(tmp_path_factory):
    """Runs remember what memory they took; those of tests are not to be remembered by a user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
