"""Speed, measured against peers in the same run. Run with ``make bench``."""
