"""The worker: one process of a run. It builds what the plan says, trains, and reports events; it uses no store."""
