"""Parts of `optim.chain` that Lockstep does not ship, for `--vocabulary=experiments.parts`."""
