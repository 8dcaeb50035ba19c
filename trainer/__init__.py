"""Trains what a config says: one plan, one compiled step, one loop."""
