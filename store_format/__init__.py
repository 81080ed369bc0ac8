"""The store: its format, its readers and its writers."""
