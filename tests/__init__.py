"""Tests. Caches of tiny models grow in place, as those of large ones do.

As shipped, caches of up to ``SHIPPED`` numbers are concatenated: tests that say so do that.
"""

from hfgen.memory.caches import growing

SHIPPED = growing.CONCATENATED
growing.CONCATENATED = 0
