"""From the arguments of ``generate`` to a call that is ready to decode: one module per stage.

May import ``decoding`` and what is below it. Read ``stages.py`` first.
"""
