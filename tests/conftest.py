"""Settings of all tests: offline, quiet, one thread per process; ``--sample`` runs some cases of each test."""

import gc
import os
import random
from collections import defaultdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

gc.disable()  # until all is imported, which each collection would walk over
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, help="run this many cases of each test, or an eighth")
    parser.addoption("--sample-seed", default="0", help="which cases (default: %(default)s)")


def pytest_report_header(config: pytest.Config) -> str | None:
    n = config.getoption("sample")
    return (
        n and f"sample: {n} cases of each test or an eighth, seed {config.getoption('sample_seed')}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--sample N``, keep of each parametrised test N cases, or an eighth where that is more."""
    if (at_least := config.getoption("sample")) is None:
        return
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for test, all_cases in cases.items():
        n_kept = min(len(all_cases), max(at_least, len(all_cases) // 8))
        rng = random.Random(f"{test} {config.getoption('sample_seed')}")  # the same in each worker
        kept.update(rng.sample(all_cases, n_kept))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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
