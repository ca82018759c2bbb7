"""Readers for serving traces of every public format, and generators of synthetic ones."""

from .request import Request, Trace

__all__ = ["Request", "Trace"]
