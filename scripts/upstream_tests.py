"""Run transformers' own tests twice, with its mixin and with hfgen's in its place, and name those that hfgen breaks.

    git clone --branch v5.23.0 https://github.com/huggingface/transformers
    python scripts/upstream_tests.py transformers tests/models/llama tests/generation -k generate

The checkout has to be of the version that is installed. Arguments after it are pytest's. Tests that fail with
transformers' mixin, too, are counted and not named. The exit code is 1 if a test fails with hfgen alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

IN_PLACE = "HFGEN_IN_PLACE"


def use_hfgen() -> None:
    """Let classes of models inherit from hfgen's mixin. No module of a model may have been imported."""
    import transformers
    import transformers.generation.utils

    import hfgen

    for module in (transformers, transformers.generation, transformers.generation.utils):
        module.GenerationMixin = hfgen.GenerationMixin  # type: ignore[attr-defined]
    assert hfgen.GenerationMixin in transformers.LlamaForCausalLM.__mro__


def outcomes(checkout: Path, arguments: list[str], in_place: bool) -> dict[str, str]:
    """Test → ``PASSED``, ``FAILED`` or ``ERROR``, in a process of its own; skipped ones have none."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), IN_PLACE: str(int(in_place))}
    options = ["-p", "upstream_tests", "-rA", "--tb=line", "-q", *arguments]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode > 1:  # interrupted, wrong options, no tests
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = re.findall(r"^(PASSED|FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    return {test: outcome for outcome, test in lines}


def main() -> None:
    """Compare the outcomes of both ways."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    checkout, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    before, after = (outcomes(checkout, arguments, in_place) for in_place in (False, True))
    broken = sorted(t for t, outcome in before.items() if outcome == "PASSED" != after.get(t))
    passed = sum(outcome == "PASSED" for outcome in after.values())
    print(*broken, sep="\n", end="\n" * bool(broken))
    failed = sum(outcome in ("FAILED", "ERROR") for outcome in before.values())
    print(
        f"{passed} pass with hfgen, {len(broken)} fail with hfgen alone; {failed} fail with transformers."
    )
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
elif os.environ.get(IN_PLACE) == "1":  # pytest has imported this file as a plug-in
    use_hfgen()
