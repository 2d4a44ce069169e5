"""Facts as TOML with source and date; a user file overrides by name."""
