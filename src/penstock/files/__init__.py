"""The only openers of data files: lent handles, retries, local copies, manifests, compression, saved tables."""
