"""Studies that stand on sweeps: a challenge is a race to a target, with rules that are checked."""
