"""The serving simulator: vLLM's scheduling rules over the real memory manager, and a cost model for time."""
