"""Values and the process: what every other package may use, and uses nothing but errors."""
