"""The policies: each a pure function from what is seen to what is granted."""
