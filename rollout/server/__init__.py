"""The HTTP front: owns text, knows no torch."""
