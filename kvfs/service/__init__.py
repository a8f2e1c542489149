"""Asking for many pages at once: a socket beside the mount, and its client."""
