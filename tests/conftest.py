"""Settings of all tests: offline, quiet, one thread per process."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

gc.disable()  # until all is imported, which each collection would walk over
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_collection_finish() -> None:
    """Leave what has been imported, a million objects, out of each collection of garbage: a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


#: Without a GPU, torch keeps each seed for when one is used, with a stack trace, which takes a millisecond.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _repeatable():
    """The same random state for each test, whatever ran before it."""
    _seed(0)
