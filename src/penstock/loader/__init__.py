"""From a dataset to batches: order, plan, slots, readers, and their reports."""
