"""The filesystem face: what the kernel asks, and how it is answered."""
