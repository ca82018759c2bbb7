"""The command `kvtide`."""
