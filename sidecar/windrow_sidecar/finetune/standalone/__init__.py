"""Jobs on a device of their own, and what they are compared with."""
