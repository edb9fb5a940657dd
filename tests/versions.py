"""Tests of what older versions of transformers do otherwise."""

import pytest
import transformers
from packaging import version

INSTALLED = version.parse(transformers.__version__)
IS_5_23 = version.parse("5.23.0") <= INSTALLED

since_5_23 = pytest.mark.skipif(not IS_5_23, reason="transformers before 5.23 does this otherwise")
IS_5_21 = version.parse("5.21.0") <= INSTALLED
since_5_21 = pytest.mark.skipif(not IS_5_21, reason="some families are new in 5.21")
