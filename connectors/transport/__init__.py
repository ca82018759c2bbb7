"""What moves values through registered memory: lanes of it, NIXL agents and media, and what peers say to each other."""
