"""Tar shards, read from beginning to end."""
