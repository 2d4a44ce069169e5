"""Start and stop worker processes; no decisions."""
