"""Studies: races to a target, claims that others can check, a referee, checks before a sweep."""
