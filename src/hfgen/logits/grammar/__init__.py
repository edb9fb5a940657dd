"""Grammars at work: matchers, the state of each row in its grammar, and the mask of its next tokens."""
