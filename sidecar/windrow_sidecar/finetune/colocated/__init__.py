"""A job in a decode pod's slot: decode's grants, lent memory, the agent."""
