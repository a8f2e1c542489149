"""What a pool does with its SSD tier: pages go down, come up, and keep their names there."""
