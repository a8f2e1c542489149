"""What connects inference engines to a mount."""
