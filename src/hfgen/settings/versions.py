"""The tested versions of transformers, and the warning about newer ones."""

from __future__ import annotations

import functools
import warnings

from packaging.specifiers import SpecifierSet

#: The versions of transformers that the tests run with. A newer one installs, and works as far as nothing moved in it.
TESTED = SpecifierSet(">=5.19,<5.25", prereleases=True)


class UntestedVersionWarning(UserWarning):
    """The installed transformers is not one of those that hfgen is tested with."""


@functools.cache
def warn_if_untested() -> None:
    """Warn, once in a process, if the installed transformers is not a tested one.

    ``PYTHONWARNINGS="ignore:hfgen is not tested"`` switches it off.
    """
    import transformers

    if transformers.__version__ not in TESTED:
        warnings.warn(
            f"hfgen is not tested with transformers {transformers.__version__}; it is tested with {TESTED}. "
            "`hfgen doctor` checks whether something that hfgen uses has changed.",
            UntestedVersionWarning,
            stacklevel=3,
        )
