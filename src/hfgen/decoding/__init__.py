"""The decode loop, its modes and strategies, drafters, and the output that it builds.

May import ``logits`` and what is below it. Read ``loop.py`` first, then ``strategies/sample.py``.
"""
