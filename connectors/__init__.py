"""Where bytes go: storage connectors, their configuration, and the bridges into engines."""
