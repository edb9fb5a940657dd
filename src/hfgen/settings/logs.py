"""The logger of everything that upstream would log too: same name, so that filters keep working."""

from transformers.utils import logging

logger = logging.get_logger("transformers.generation.utils")
