"""Every metric name, and how the numbers are shown."""
