"""What a step does, as data: which tasklets may run, in which order they do, what they take."""
