"""Translates OpenAI's request bodies to arguments of ``generate``, and outputs to response bodies.

Bodies are those of ``/v1/chat/completions`` and ``/v1/completions`` (platform.openai.com/docs/api-reference),
with the further fields of vLLM's server and hfgen's own. Everything here is plain dicts.
"""
