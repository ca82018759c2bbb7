"""`LMDBConnector` inside: an LMDB index over segment files of equal slots, their space, and what a crash leaves."""
