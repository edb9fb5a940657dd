"""Tests of what the oldest supported transformers does otherwise."""

import pytest
import transformers
from packaging import version

IS_5_23 = version.parse(transformers.__version__) >= version.parse("5.23.0")

since_5_23 = pytest.mark.skipif(not IS_5_23, reason="transformers before 5.23 does this otherwise")
