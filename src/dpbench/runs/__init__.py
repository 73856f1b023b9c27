"""What a run leaves: its folder, files and record."""
