"""``hfgen serve``: a web server with OpenAI's interface on hfgen's engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging import version

TESTED = ("5.23", "5.24")  # versions of transformers whose server the adapter is tested with

#: What the server imports, all of it in the extra ``hfgen[serve]``.
PACKAGES = ("fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")


def check_requirements(installed: str | None = None) -> None:
    """Raise ``ImportError`` if a package is missing, or transformers is of an untested version.

    To be called before ``hfgen.tools.serve.server`` is imported, which subclasses what is in
    ``transformers.cli.serving``: that is no public interface, and changes between versions.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ImportError(f"serving needs {', '.join(missing)}: pip install 'hfgen[serve]'")
    installed = installed or importlib.metadata.version("transformers")
    parsed = version.parse(installed)
    if f"{parsed.major}.{parsed.minor}" not in TESTED:
        tested = ", ".join(f"{each}.x" for each in TESTED)
        raise ImportError(
            f"`hfgen serve` is made for the server of transformers {tested}, but {installed} is "
            f"installed: pip install 'transformers=={TESTED[-1]}.*'"
        )
