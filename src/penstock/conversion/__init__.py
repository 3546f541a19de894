"""Datasets written in another layout: once, within a memory budget, verified, and resumable after any interruption."""
