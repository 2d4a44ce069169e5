"""Who answers which request: pure decisions."""
