"""Who runs where: a snapshot in, decisions with reasons out."""
