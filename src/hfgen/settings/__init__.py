"""What a call may ask for: the fields of a generation config, their kinds and their checks, as plain data.

Nothing here runs a model; the command line reads it without torch. Read ``fields.py`` first.
"""
