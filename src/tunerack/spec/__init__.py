"""What the user asked for: frozen dataclasses, parsed with every error at once."""
