"""What a call knows while it runs: its arguments and stages' results, its rows, their noise, the text of tokens.

Dataclasses and pure functions; may import ``settings``. Read ``call.py`` first.
"""
