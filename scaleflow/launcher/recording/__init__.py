"""The record of a run: its events go to the tracking store while it trains, and are completed after a fault."""
