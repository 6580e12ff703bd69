"""The worker: builds what a plan says, trains it, and tells of it; it knows no tracker."""
