"""`MultiConnector` inside: the tiers of a stack, and how values are written down from one to the next."""
