"""Readers for serving traces of every public format, and generators of synthetic ones."""

from .formats import DEFAULT_TOKENS_PER_IMAGE, FORMATS, open_trace
from .request import Progress, Request, Trace
from .tables import GENERIC_KEYS

__all__ = ["DEFAULT_TOKENS_PER_IMAGE", "FORMATS", "GENERIC_KEYS", "Progress", "Request", "Trace", "open_trace"]
