"""A run's files on disk: its folder, its tables, and reading them back."""
