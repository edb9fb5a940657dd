"""The prefix cache: common beginnings of prompts, computed once and kept across calls. Read ``session.py`` first."""

from .cache import PrefixCache, PrefixStats
from .session import begin, check, take_argument

__all__ = ["PrefixCache", "PrefixStats", "begin", "check", "take_argument"]
