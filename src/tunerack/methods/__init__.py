"""How a fine-tune changes a base model: configuration, counts, identity."""
