"""Programs compiled ahead of time, for devices that need not exist, and what they cost."""
