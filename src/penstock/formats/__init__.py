"""One file a format: metadata -> a store."""
