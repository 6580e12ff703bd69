"""Charts and HTML, for scaleflow's pages and for the pictures of runs, sweeps and pipelines."""
