"""Stand-ins that speak over real sockets from real processes."""
