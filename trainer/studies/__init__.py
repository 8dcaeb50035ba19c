"""Studies: races to a target, with rules that are checked; checks that are made before a sweep."""
