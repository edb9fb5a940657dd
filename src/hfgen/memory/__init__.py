"""What stays between steps: the rows of a batch, and KV caches.

May import ``settings`` and ``state``. Read ``caches/__init__.py`` first.
"""
