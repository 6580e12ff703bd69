"""Charts and HTML, for the pages that scaleflow writes and for the pictures of runs, sweeps and pipelines."""
