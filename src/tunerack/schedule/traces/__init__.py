"""Job traces as others publish them, read into one form."""
