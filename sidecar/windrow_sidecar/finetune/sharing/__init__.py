"""How several jobs share one base model in one worker, taking turns."""
