"""Studies: races to a target, claims that others can check, and checks before a sweep."""
