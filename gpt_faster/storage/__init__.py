"""What this user keeps on disk for the next start."""
