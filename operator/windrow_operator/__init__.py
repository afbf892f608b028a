"""Which job goes on which GPU, and what we tell the user."""
