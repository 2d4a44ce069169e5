"""What a fine-tune needs, takes and costs: pure arithmetic."""
