"""A tree of files that many processes share, and the room in it: for shared storage and for NIXL."""
