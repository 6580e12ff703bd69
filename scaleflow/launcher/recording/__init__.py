"""Records a run: sends its events to the tracking store during training, and completes the record after a failure."""
