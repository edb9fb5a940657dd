"""Tests. Caches of tiny models grow in place, as those of large ones do."""

from hfgen.caches import growing

growing.CONCATENATED = 0
