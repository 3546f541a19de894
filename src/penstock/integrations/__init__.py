"""penstock inside other people's training loops. Each module needs its package, and is imported by its own name."""
