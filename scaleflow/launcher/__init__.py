"""The launcher: it starts what computes, shows and records what that tells, and says how the run ended."""
