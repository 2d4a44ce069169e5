"""The only SQL: files, jobs, adapters, usage, workers."""
