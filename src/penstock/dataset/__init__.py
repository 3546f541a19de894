"""Stores of rows, stores made of stores, and ``Dataset``, what a user holds."""
