"""Other projects' MLA kernels behind the one call: each module calls one package and undoes its conventions.

An adapter has `SUPPORT`, what its kernel takes; `load()`, which imports the package and returns its function, raising
what the import raises; and `decode(call)`. The conventions that have to be undone are gathered in `framing.py`.
"""
