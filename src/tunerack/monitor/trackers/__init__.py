"""Trackers of curves: one file each, found by its name; `LIBRARY` is the package it needs, `start(run)` begins."""
