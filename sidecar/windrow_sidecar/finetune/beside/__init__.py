"""A job in a slot: decode's grants, lent memory, the agent."""
