"""What a training consists of besides its layers: rows, steps, figures, health."""
