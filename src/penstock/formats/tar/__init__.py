"""Tar archives: which members make which sample, and where they lie."""
