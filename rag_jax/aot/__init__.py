"""Programs compiled ahead of time, for devices that are not there: what they need and do."""
