"""Who reads the bytes: paged MLA attention, cache writes, block copies, and the registry of kernel backends."""
