"""From tables of where bytes lie, and wanted rows, to elements in the caller's memory."""
