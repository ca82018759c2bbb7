"""A cache and a paged runner for unmodified transformers models."""
