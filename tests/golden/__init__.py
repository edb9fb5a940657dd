"""Outputs of transformers 4.49.0, and how its tiny models are built again. See README.md."""
