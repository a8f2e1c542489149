"""A tier is a directory of ordinary files that mirrors the mount; what they hold is the truth."""
