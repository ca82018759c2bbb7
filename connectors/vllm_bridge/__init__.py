"""The two halves of the vLLM connector, its scheduler and its workers, and what they tell each other."""
