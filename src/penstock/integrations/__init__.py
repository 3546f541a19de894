"""penstock inside other training frameworks. Each module needs its own package: ``penstock.integrations.lightning``."""
