"""What of a layer's forward is kept for its backward, and what is computed again."""
