"""The worker: one process of a run. It builds everything that the plan describes, trains, and reports events.

It never connects to the store.
"""
