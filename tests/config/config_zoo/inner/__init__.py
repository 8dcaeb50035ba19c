"""A package within; `layers` is imported by nobody until a config names it."""
