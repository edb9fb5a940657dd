"""Measuring a model: the perplexity of texts, metrics of its completions, and its speed."""
