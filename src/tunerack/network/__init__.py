"""How devices are joined, and what a collective over them costs."""
