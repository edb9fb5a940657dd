"""Programs on top of hfgen: the command line, the server, evaluation, the built-in model.

Nothing outside of this room imports it. Read ``cli/__init__.py`` first.
"""
