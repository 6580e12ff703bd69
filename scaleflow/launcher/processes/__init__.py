"""The processes of a run: how they start, on this machine or on Ray, how they are watched, restarted and stopped."""
