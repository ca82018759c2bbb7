"""When bytes move: the store interface, keys and values, policies, transfers, and the offload manager."""
