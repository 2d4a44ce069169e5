"""Rows in, trained tokens out: formats, templates and masks, the resumable order."""
