"""The prefix cache: common beginnings of prompts, computed once and kept across calls.

``begin`` fills the call's own empty cache before decoding; the call then continues a cache.
"""

from .cache import PrefixCache, PrefixStats
from .session import begin, check, take_argument

__all__ = ["PrefixCache", "PrefixStats", "begin", "check", "take_argument"]
