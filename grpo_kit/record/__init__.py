"""What a run leaves on disk: its folder, its files, and reading them back."""
