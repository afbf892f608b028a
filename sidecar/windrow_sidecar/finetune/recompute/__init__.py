"""What a layer keeps of its forward, and what backward computes again."""
