"""Memory of a job beside decode, and how it is emptied when decode asks for it."""
