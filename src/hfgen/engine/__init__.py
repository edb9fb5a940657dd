"""Continuous batching: many requests on the one loop, whose rows enter and leave."""
