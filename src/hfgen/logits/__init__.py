"""From the model's logits to scores and to an end: processors, grammars, log-probabilities, stopping criteria.

May import ``running`` and what is below it. Read ``processors/__init__.py`` first.
"""
