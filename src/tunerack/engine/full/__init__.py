"""Full fine-tuning: one job that changes every weight of a base of its own."""
