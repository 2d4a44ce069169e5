"""The policies; each file has `make()`."""
