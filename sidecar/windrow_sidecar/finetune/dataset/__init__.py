"""From what `spec.dataset` names to tokens that a step can take."""
