"""Requests of any mix of adapters in one batch: admission, steps, sampling, text."""
