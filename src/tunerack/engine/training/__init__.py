"""Several jobs on one base: each its own adapter, data, optimizer and random streams; one pass for all."""
