"""What the daemon shows of itself: status and metrics."""
